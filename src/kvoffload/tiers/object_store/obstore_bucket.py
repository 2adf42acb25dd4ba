"""ObstoreBucket: a bucket of S3, Google Cloud Storage or Azure, or a local directory, through obstore."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvoffload.abc import Ability, ByteArray
from kvoffload.tiers.object_store.bucket import MAX_NOTE, TIMES, Answer, Bucket, Found, NewObject, Piece, Times
from kvoffload.tiers.object_store.errors import NO_PROXY_THERE, BucketProblem, classify, explain
from kvoffload.tiers.remote.client import Outcome, StoreError

SMALL_REQUESTS = 64
"""Requests without bytes at once."""
TRANSFERS = 16
"""Objects read at once, and objects written."""
CHUNK_BYTES = 1 << 18
"""Bytes of an object received at once, beside the connection's buffer."""
NOTE_KEY = "kvoffload"
"""The name of the metadata with the note, in S3 ``x-amz-meta-kvoffload``."""

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_SERVICES = ("AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
"""Variables with addresses of services that give credentials."""
_AMAZON = ("amazonaws.com", "169.254.0.0/16", "fd00:ec2::/32")
"""Amazon's S3 and token service, and the credential services of its machines."""

TEST_NAME, TEST_NOTE = "identities/connection-test", "test"
"""An object that shows whether the store keeps notes."""

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def open_bucket(
    settings: Mapping[str, Any], times: Times = TIMES, clock: Callable[[], float] = time.monotonic
) -> ObstoreBucket:
    """Returns the bucket that ``settings`` of ObjectStoreConfig name, once it has answered. Raises StoreError."""
    try:
        import obstore
    except ImportError as error:
        raise StoreError(f"obstore cannot be loaded ({type(error).__name__}); reinstall it") from error
    url = settings["url"]
    try:
        small = _make_store(settings, times, times.small_s, max_retries=1)
        transfers = _make_store(settings, times, times.transfer_s, max_retries=2)
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(explain(error, url)) from None
    bucket = ObstoreBucket(obstore, small, transfers, url, times, clock)
    bucket.check(f"{settings['prefix']}/{TEST_NAME}")
    return bucket


def _make_store(settings: Mapping[str, Any], times: Times, timeout_s: float, max_retries: int) -> Any:
    from obstore.store import from_url

    url, endpoint = settings["url"], settings.get("endpoint")
    if url.startswith("file:"):
        return from_url(url, mkdir=True)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=times.connect_s),
        },
        # The defaults go on for minutes. A request that has timed out is not tried again, because that took longer.
        "retry_config": {
            "max_retries": max_retries,
            "retry_timeout": timedelta(seconds=times.retry_within_s),
            "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(milliseconds=400)},
        },
    }
    if url.startswith("s3:"):
        # Blocks have checksums of their own; with TLS their way is protected too.
        options |= {"unsigned_payload": True, "disable_bulk_delete": True}
        environment_endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint:
            options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = (endpoint or environment_endpoint).startswith("http:")
        options["client_options"] |= _own_hosts_only(endpoint or environment_endpoint)
        if settings.get("region"):
            options["region"] = settings["region"]
        provider = _profile_credentials()
        if provider is not None:
            options["credential_provider"] = provider
    return from_url(url, **options)


def _own_hosts_only(endpoint: str) -> dict[str, str]:
    """Returns options with which obstore reaches the store and the services for credentials, and nothing else.

    obstore follows redirects, with the session token and the bytes of blocks, and has no option against it. So all
    other hosts get a proxy that does not exist. A proxy of the environment takes precedence.
    """
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in _PROXIES):
        return {}
    addresses = [endpoint, *(os.environ.get(name, "") for name in _SERVICES)]
    hosts = [host for host in (urlsplit(address).hostname for address in addresses if address) if host]
    return {"proxy_url": f"http://{NO_PROXY_THERE}", "proxy_excludes": ",".join([*hosts, *_AMAZON])}


def _profile_credentials() -> Any:
    """Returns a reader of the shared files of AWS, which obstore does not read; None if credentials come from
    elsewhere."""
    environment = os.environ
    if any(
        environment.get(name)
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        )
    ):
        return None
    profile = environment.get("AWS_PROFILE")
    shared = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    described = Path(environment.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    if not profile and not shared.is_file() and not described.is_file():
        return None
    if importlib.util.find_spec("boto3") is None:
        if profile:
            raise StoreError("AWS_PROFILE is set, and profiles need boto3; run pip install boto3")
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except Exception as error:
        if profile:
            raise StoreError(
                f"the profile of AWS_PROFILE has no credentials ({type(error).__name__}); run aws configure, or "
                "correct AWS_PROFILE"
            ) from None
        return None


class ObstoreBucket(Bucket):
    """The objects below ``url``. ``small`` and ``transfers`` are two stores of ``obstore`` with the same bucket, which
    have timeouts for requests without and with bytes.

    The synchronous functions on threads cost less CPU time than the asynchronous ones.
    """

    def __init__(
        self, obstore: Any, small: Any, transfers: Any, url: str, times: Times, clock: Callable[[], float]
    ) -> None:
        self._obstore = obstore
        self._small, self._transfers = small, transfers
        self._url = url
        self._times = times
        self._clock = clock
        # A local directory keeps no metadata.
        self.has_notes = not url.startswith("file:")
        self._unconditional_until = float("-inf")
        self._quiet_until = dict.fromkeys(Ability, 0.0)
        """Until when nothing is asked for, because an answer was late."""
        self._lock = threading.Lock()
        self._small_threads = ThreadPoolExecutor(SMALL_REQUESTS, "small")
        self._get_threads = ThreadPoolExecutor(TRANSFERS, "get")
        self._put_threads = ThreadPoolExecutor(TRANSFERS, "put")

    def check(self, name: str) -> None:
        """Reads the test object ``name``, puts it if it is missing or has a wrong note, and so learns whether the store
        keeps notes. Raises StoreError unless the store answers that it has the object, or does not have it."""
        found = None
        try:
            # Only the answer to a GET says whether the bucket exists.
            found = self._found(self._obstore.get(self._small, name))
        except Exception as error:
            if not isinstance(error, FileNotFoundError) or classify(error) is BucketProblem.NO_BUCKET:
                raise StoreError(explain(error, self._url)) from None
        if found is None or (self.has_notes and found.note != TEST_NOTE):
            # Some tools copy a bucket without its notes.
            with suppress(Exception):
                # Credentials may be read-only.
                self._obstore.put(self._small, name, b"0", attributes={NOTE_KEY: TEST_NOTE}, use_multipart=False)
            try:
                found = self._found(self._obstore.get(self._small, name))
            except Exception:
                return
        if self.has_notes and found.note != TEST_NOTE:
            self.has_notes = False
            logger.warning(
                "%s: the store does not return the metadata of objects, so each block takes an object of its own",
                self._url,
            )

    def head(self, names: Sequence[str]) -> list[Answer]:
        return self._all(Ability.READ, self._small_threads, self._head, names, self._times.small_budget_s)

    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        return self._all(Ability.READ, self._get_threads, self._get, pieces, self._times.transfer_budget_s)

    def put(self, objects: Sequence[NewObject]) -> list[Outcome]:
        return self._all(Ability.WRITE, self._put_threads, self._put, objects, self._times.transfer_budget_s)

    def delete(self, names: Sequence[str]) -> list[Outcome]:
        return self._all(Ability.WRITE, self._small_threads, self._delete, names, self._times.small_budget_s)

    def _all(
        self,
        ability: Ability,
        threads: ThreadPoolExecutor,
        request: Callable[[_Item], _Result],
        items: Sequence[_Item],
        budget_s: float,
    ) -> list[_Result | Any]:
        """Returns the answer to each request, or FAILED for requests that did not begin within ``budget_s``."""
        began = self._clock()
        if began < self._quiet_until[ability]:
            raise StoreError(f"{self._url}: {BucketProblem.TIMEOUT.value}")
        problems: list[Exception] = []

        def run(item: _Item) -> _Result | Outcome:
            if self._clock() - began > budget_s:
                return Outcome.FAILED
            try:
                return request(item)
            except Exception as error:
                return self._outcome(error, problems)

        answers = list(threads.map(run, items)) if len(items) > 1 else [run(item) for item in items]
        if answers and all(answer is Outcome.FAILED for answer in answers):
            if problems and classify(problems[0]) is BucketProblem.TIMEOUT:
                self._quiet_until[ability] = self._clock() + self._times.quiet_s
            raise StoreError(
                explain(problems[0], self._url) if problems else f"{self._url}: {BucketProblem.TIMEOUT.value}"
            )
        return answers

    @staticmethod
    def _outcome(error: Exception, problems: list[Exception]) -> Outcome:
        problem = classify(error)
        if isinstance(error, FileNotFoundError) and problem is not BucketProblem.NO_BUCKET:
            return Outcome.MISSING
        if problem is BucketProblem.FULL:
            return Outcome.FULL
        if problem is BucketProblem.OUT_OF_RANGE:
            return Outcome.OTHER_SIZE
        if not problems:
            # One is enough: it has the text of the store's answer.
            problems.append(error)
        return Outcome.FAILED

    def _head(self, name: str) -> Answer:
        return self._found(self._obstore.get(self._small, name, options={"head": True}))

    @staticmethod
    def _found(result: Any) -> Found:
        # A longer note says nothing, and thousands of objects are asked for at once.
        note = dict(result.attributes).get(NOTE_KEY, "")
        return Found(result.meta["size"], note if len(note) <= MAX_NOTE else "")

    def _get(self, piece: Piece) -> Answer:
        options = {"range": (piece.start, piece.start + piece.nbytes)}
        result = self._obstore.get(self._transfers, piece.name, options=options)
        found = self._found(result)
        # In chunks, because a store may send more than was asked for.
        _fill(piece.buffers, result.stream(min_chunk_size=CHUNK_BYTES))
        return found

    def _put(self, item: NewObject) -> Outcome:
        options: dict[str, Any] = {"attributes": {NOTE_KEY: item.note}} if item.note else {}
        if self._clock() >= self._unconditional_until:
            try:
                self._obstore.put(self._transfers, item.name, list(item.buffers), mode="create", **options)
                return Outcome.OK
            except self._obstore.exceptions.AlreadyExistsError:
                return Outcome.HELD
            except Exception as error:
                is_unknown = isinstance(error, self._obstore.exceptions.NotSupportedError)
                if not is_unknown and classify(error) is not BucketProblem.NOT_IMPLEMENTED:
                    raise
                self._note_unconditional()
        self._obstore.put(
            self._transfers, item.name, list(item.buffers), mode="overwrite", use_multipart=False, **options
        )
        return Outcome.OK

    def _note_unconditional(self) -> None:
        with self._lock:
            is_new = self._unconditional_until == float("-inf")
            self._unconditional_until = self._clock() + self._times.relearn_s
            if is_new:
                logger.warning(
                    "%s: the store has no conditional put; two servers that compute the same block may both store it",
                    self._url,
                )

    def _delete(self, name: str) -> Outcome:
        self._obstore.delete(self._small, name)
        return Outcome.OK

    def close(self) -> None:
        for threads in (self._small_threads, self._get_threads, self._put_threads):
            threads.shutdown(wait=False, cancel_futures=True)


def _fill(buffers: Sequence[ByteArray], chunks: Iterable[Any]) -> None:
    """Puts ``chunks`` of bytes into the buffers, one after the other. Raises ValueError unless they fit."""
    left = [buffer.data for buffer in reversed(buffers)]
    for chunk in chunks:
        data = memoryview(chunk)
        while len(data):
            if not left:
                raise ValueError("more bytes than were asked for")
            part = left.pop()
            size = min(len(part), len(data))
            part[:size] = data[:size]
            if size < len(part):
                left.append(part[size:])
            data = data[size:]

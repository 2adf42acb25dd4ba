"""Meanings of the errors of stores, in words without secrets.

Messages of obstore contain addresses, which may be signed, and answers of the store, which may repeat keys. The log
gets only the status, the store's code and words of this module.
"""

from __future__ import annotations

import enum
import re

_STATUS = re.compile(r"status(?: code)?: ([1-5][0-9]{2})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{3,40})</Code>")
_ADDRESS = re.compile(r"https?://[\w.:\[\]-]+(?=[/\s,)?]|$)")
"""Matches the host of a request, without the parts before and behind it, which may be secret."""
_REASONS = (
    ("dns error", "its name is not known"),
    ("Connection refused", "connection refused"),
    ("ConnectionRefused", "connection refused"),
    ("ertificate", "its certificate is not accepted"),
    ("InvalidContentType", "it does not speak TLS: write http:// if that is intended"),
    ("unreachable", "no route"),
)
"""Parts of obstore's texts, and their meanings."""
_SERVICES = ("169.254.", "/latest/", "metadata", "oauth2", "credential")
"""Parts of addresses and messages of the services that give credentials to machines."""
NO_PROXY_THERE = "127.0.0.1:0"
"""An address without a proxy."""


class BucketProblem(enum.Enum):
    """Kinds of errors that are not the answer of a healthy store. The values are texts for the log."""

    EXPIRED = "the credentials have expired; renew them or use a role, which renews itself"
    KEYS = "the store does not accept the credentials; check the keys, and the clock of this machine"
    NO_CREDENTIALS = (
        "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what docs/shared.md lists"
    )
    REFUSED = (
        "access is refused; the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket, "
        "without which a missing object is refused too, or the equivalent rights in other stores"
    )
    NO_BUCKET = "there is no such bucket; create it or correct url"
    OTHER_REGION = "the bucket is in another region; set region"
    SLOW_DOWN = "the store asks for fewer requests"
    FULL = "the store has no room"
    NOT_IMPLEMENTED = "the store does not implement this request"
    TIMEOUT = "the store did not answer in time"
    REDIRECTED = (
        "the store redirects requests to another host, and redirects are not followed; set endpoint to the address of "
        "the host that has the bucket"
    )
    UNREACHABLE = "the store cannot be reached"
    OUT_OF_RANGE = "the object is shorter"
    OTHER = "the request failed"


_CODES = {
    BucketProblem.EXPIRED: ("ExpiredToken", "TokenRefreshRequired"),
    BucketProblem.KEYS: (
        "RequestTimeTooSkewed", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure", 401,
    ),
    BucketProblem.REFUSED: (403,),
    BucketProblem.NO_BUCKET: ("NoSuchBucket", "ContainerNotFound"),
    BucketProblem.OTHER_REGION: (
        "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", 301,
    ),
    BucketProblem.SLOW_DOWN: ("SlowDown", "Throttling", "RequestLimitExceeded", "ServerBusy", 429, 503),
    BucketProblem.FULL: (
        "QuotaExceeded", "XMinioStorageFull", "StorageFull", "InsufficientStorage", "InsufficientCapacity", 507,
    ),
    BucketProblem.NOT_IMPLEMENTED: ("NotImplemented", 501),
    BucketProblem.TIMEOUT: (408, 504),
    BucketProblem.OUT_OF_RANGE: ("InvalidRange", 416),
}  # fmt: skip
_MEANINGS: dict[str | int | None, BucketProblem] = {
    code: problem for problem, codes in _CODES.items() for code in codes
}
"""Meanings of the store's codes and, if there is none, of the status."""


def classify(error: BaseException) -> BucketProblem:
    """Returns the kind of problem of ``error``, an exception of obstore."""
    text = str(error)
    if NO_PROXY_THERE in text:
        return BucketProblem.REDIRECTED
    status, code = _status(text), _code(text)
    if "//169.254." in text or "//metadata.google" in text:
        # The machine's own service for credentials: it is asked because there are none. Its status is not the store's.
        return BucketProblem.NO_CREDENTIALS
    if code in _MEANINGS:
        return _MEANINGS[code]
    if status is not None:
        return _MEANINGS.get(status, BucketProblem.OTHER)
    if "redirect without LOCATION" in text:
        return BucketProblem.OTHER_REGION
    if any(each in text.lower() for each in _SERVICES):
        return BucketProblem.NO_CREDENTIALS
    if "TimedOut" in text or "timed out" in text or "kind: Timeout" in text:
        return BucketProblem.TIMEOUT
    if "kind: Connect" in text or "dns error" in text or "HttpError" in text:
        return BucketProblem.UNREACHABLE
    return BucketProblem.OTHER


def explain(error: BaseException, where: str) -> str:
    """Returns a sentence about ``error`` for the log. ``where``: the bucket."""
    text = str(error)
    facts = [str(each) for each in (_status(text), _code(text)) if each is not None]
    kind = f" ({' '.join(facts)})" if facts else f" ({type(error).__name__})"
    problem = classify(error)
    if problem is BucketProblem.UNREACHABLE and not facts:
        kind = _unreachable(text)
    return f"{where}: {problem.value}{kind}"


def _unreachable(text: str) -> str:
    """Returns the address that cannot be reached and the reason, if ``text`` names them."""
    address = _ADDRESS.search(text)
    reason = next((said for words, said in _REASONS if words in text), "no connection")
    return f" at {address[0]} ({reason})" if address else f" ({reason})"


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return None if found is None else int(found[1])


def _code(text: str) -> str | None:
    found = _CODE.search(text)
    return None if found is None else found[1]

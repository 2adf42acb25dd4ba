"""ByteCodec: blocks of KV without loss in fewer bytes. It runs in the client's process and needs ``zstandard``.

The bytes of numbers of 1, 2 or 4 bytes are split into planes: all first bytes of the numbers, all second ones and so
on. The plane with the exponents compresses well, one of mantissas hardly, and is kept as it is. The bytes alone say
what the numbers are: the split that makes a sample the smallest is chosen for each block.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from kvoffload.abc import ByteArray, ConfigError

ITEM_BYTES = (1, 2, 4)
"""FP8; bfloat16 and float16; float32."""
CHUNK_BYTES = 1 << 18
"""Bytes that are split and compressed at once: they fit into a processor's cache, and bound the memory beside the block
and its compressed form."""
LEVEL = 1
"""Higher levels of zstd are slower and find nothing more in KV."""
MOST = 0.97
"""A plane that compresses to a larger share is kept as it is, and so is a block."""
SAMPLES, SAMPLE_BYTES = 4, 1 << 11
_LENGTH = struct.Struct("<I")


def check_installed() -> None:
    """Raises ConfigError if the library is missing."""
    if importlib.util.find_spec("zstandard") is None:
        raise ConfigError(
            "compress",
            True,
            "zstandard is not installed",
            "run pip install zstandard, or install kvoffload with its extra compress",
        )


class ByteCodec:
    """Compresses and decompresses blocks. One thread uses it at a time.

    The compressed form is one byte, the bytes per number, then the planes of each chunk: four bytes for the length,
    then a frame of zstd, or the plane itself if the length is its own.
    """

    def __init__(self) -> None:
        import zstandard

        self._zstd = zstandard
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, parts: Sequence[ByteArray], out: ByteArray) -> int:
        """Writes the compressed form of ``parts`` to ``out``. Returns its size, or 0 if it does not fit or would be
        hardly smaller; ``out`` has any bytes then."""
        item_bytes, shrinking = self._best_split(parts)
        view, at = out.data, 1
        if not shrinking or not len(view):
            return 0
        view[0] = item_bytes
        for number, plane in _planes(parts, item_bytes):
            # Faster than tobytes, which copies byte by byte.
            data: memoryview | bytes = np.ascontiguousarray(plane).data
            if number in shrinking:
                # Of equal lengths the plane itself: its length says so.
                data = min(data, self._compressor.compress(data), key=len)
            end = at + _LENGTH.size + len(data)
            if end > len(view):
                return 0
            _LENGTH.pack_into(view, at, len(data))
            view[at + _LENGTH.size : end] = data
            at = end
        return at

    def decompress(self, data: ByteArray, parts: Sequence[ByteArray]) -> bool:
        """Fills ``parts`` from the compressed form ``data``. Returns whether that is one of exactly their size. No
        frame is decompressed that announces another size than its plane has."""
        view, at = data.data, 1
        if not len(view) or view[0] not in ITEM_BYTES:
            return False
        for _, plane in _planes(parts, view[0]):
            begin = at + _LENGTH.size
            if begin > len(view):
                return False
            at = begin + _LENGTH.unpack_from(view, begin - _LENGTH.size)[0]
            if at > len(view) or at - begin > plane.size:
                return False
            stored = view[begin:at] if at - begin == plane.size else self._decompressed(view[begin:at], plane.size)
            if len(stored) != plane.size:
                return False
            plane[:] = np.frombuffer(stored, dtype=np.uint8)
        return at == len(view)

    def _decompressed(self, frame: memoryview, nbytes: int) -> bytes:
        """Returns the content of ``frame`` if it has ``nbytes``, else nothing."""
        try:
            if self._zstd.get_frame_parameters(frame).content_size != nbytes:
                return b""
            content: bytes = self._decompressor.decompress(frame, allow_extra_data=False)
        except self._zstd.ZstdError:
            return b""
        return content

    def _best_split(self, parts: Sequence[ByteArray]) -> tuple[int, set[int]]:
        """Returns the bytes per number that suit a sample of ``parts`` best, and the planes worth compressing."""
        sample = _sample(parts)
        best, fewest = (1, set[int]()), sample.size * MOST
        for item_bytes in ITEM_BYTES:
            shrinking, total = set(), 0
            for number in range(item_bytes):
                plane = sample[number::item_bytes].tobytes()
                nbytes = len(self._compressor.compress(plane))
                if nbytes < len(plane) * MOST:
                    shrinking.add(number)
                total += min(nbytes, len(plane))
            if total < fewest:
                best, fewest = (item_bytes, shrinking), total
        return best


def kv_like(nbytes: int, seed: int = 0) -> ByteArray:
    """Returns bfloat16 numbers of a normal distribution, with a scale per channel of 64, as in KV."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=64))
    numbers = (rng.normal(size=(nbytes // 128 + 1, 64)) * scales).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)[:nbytes].copy()


def _planes(parts: Sequence[ByteArray], item_bytes: int) -> Iterator[tuple[int, ByteArray]]:
    """Yields each plane of each chunk, and which of a number's bytes it has."""
    for part in parts:
        for at in range(0, part.size, CHUNK_BYTES):
            for number in range(item_bytes):
                yield number, part[at : at + CHUNK_BYTES][number::item_bytes]


def _sample(parts: Sequence[ByteArray]) -> ByteArray:
    largest = max(parts, key=len)
    starts = [largest.size * i // SAMPLES & ~3 for i in range(SAMPLES)]
    return np.concatenate([largest[at : at + SAMPLE_BYTES] for at in starts])

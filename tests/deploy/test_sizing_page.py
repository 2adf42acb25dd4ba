"""The figures of docs/sizing.md that follow from a formula."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvoffload.lab.model import ModelShape

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sizing.md").read_text()
GIB = 1 << 30
QWEN3_8B = 144 * 1024
ROWS = re.findall(r"^\| ([\w.-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
assert len(ROWS) == 8


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_kv_per_token(row: tuple[str, ...]) -> None:
    _, layers, heads, head_size, kib, tokens, block = row
    config = {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": int(layers),
        "num_key_value_heads": int(heads),
        "num_attention_heads": 8 * int(heads),
        "head_dim": int(head_size),
        "hidden_size": 8 * int(heads) * int(head_size),
        "intermediate_size": 4096,
    }
    nbytes = ModelShape.from_config(config).bytes_per_token
    assert int(kib) * 1024 == nbytes
    assert int(tokens.replace(",", "")) == 64 * GIB // nbytes
    assert abs(float(block) - 16 * nbytes / 2**20) <= 0.005


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200 x 8,000 x 144 KiB = 220 GiB", 200 * 8000 * QWEN3_8B / GIB),
        ("64 GiB / (2,000 x 144 KiB) = 233 s", 64 * GIB / (2000 * QWEN3_8B)),
        ("2,000 per second of Qwen3-8B write 295 MB/s", 2000 * QWEN3_8B / 1e6),
        ("or 25 TB", 2000 * QWEN3_8B * 86400 / 1e12),
        ("| Llama-3.1-8B, one GPU | 10,000 | 1.3 GB/s", 131072 * 10000 / 1e9),
        ("| Qwen3-32B, one GPU | 3,000 | 0.8 GB/s", 262144 * 3000 / 1e9),
        ("| Llama-3.3-70B, four GPUs | 6,000 | 2.0 GB/s", 327680 * 6000 / 1e9),
        ("| DeepSeek-V3, eight GPUs | 10,000 | 0.7 GB/s", 61 * 576 * 2 * 10000 / 1e9),
        ("5 x 6,000 x 144 KiB = 4.4 GB/s", 5 * 6000 * QWEN3_8B / 1e9),
        ("53 GB: 359,429 tokens", 53e9 / QWEN3_8B),
        ("224 GiB / (2 x 1,500 x 144 KiB) = 544 s", 224 * GIB / (3000 * QWEN3_8B)),
        ("2 x 1,500 x 144 KiB = 442 MB/s", 3000 * QWEN3_8B / 1e6),
        ("442 MB/s, 38 TB", 3000 * QWEN3_8B * 86400 / 1e12),
        ("3 TiB / 442 MB/s = 2.1 h", 3 * 2**40 / (3000 * QWEN3_8B) / 3600),
        ("10,000 x 144 KiB = 1.5 GB/s", 10000 * QWEN3_8B / 1e9),
    ],
)
def test_a_figure_is_what_its_formula_gives(text: str, value: float) -> None:
    assert text in PAGE
    number = re.findall(r"[\d,]*\d(?:\.\d+)?(?= (?:GiB|GB|TB|MB|s|h|tokens)\b)", text)[-1]
    digits = len(number.partition(".")[2])
    assert number.replace(",", "") == f"{value:.{digits}f}"

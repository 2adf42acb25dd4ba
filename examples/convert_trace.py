"""Makes a trace in Mooncake's format of conversations with text, such as ShareGPT's:

    python examples/convert_trace.py sharegpt.json trace.jsonl MODEL/tokenizer.json
    kvoffload size trace.jsonl

The file is a JSON array, or one conversation per line, each {"conversations": [{"from": ..., "value": text}, ...]} or
{"messages": [{"role": ..., "content": text}, ...]}. Each answer is a request, and all turns before it are its prompt.
There are no times in it: a conversation starts --every seconds after the one before, and its user thinks for --pause
seconds. The chat template of the model is left out. Needs tokenizers, which vLLM has.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

ANSWERS = ("gpt", "assistant")


def conversations(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


def turns(conversation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the speaker and the text of each turn."""
    for turn in conversation.get("conversations") or conversation.get("messages") or ():
        yield turn.get("from") or turn["role"], turn.get("value") or turn.get("content") or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conversations", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("tokenizer", help="the model's tokenizer.json")
    parser.add_argument("--block-tokens", type=int, default=512, help="default: 512, as in Mooncake's traces")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="default: 1")
    parser.add_argument("--pause", type=float, default=10.0, metavar="S", help="default: 10")
    args = parser.parse_args()
    tokenizer, size = Tokenizer.from_file(args.tokenizer), args.block_tokens
    names: dict[tuple[int, ...], int] = {}  # of each block: its tokens, and the name of the block before it
    with args.trace.open("w") as out:
        for session, conversation in enumerate(conversations(args.conversations)):
            tokens: list[int] = []
            chain: list[int] = []
            when = {"timestamp": 1000 * args.every * session}
            for speaker, text in turns(conversation):
                asked, new = len(tokens), tokenizer.encode(f"{speaker}\n{text}\n", add_special_tokens=False).ids
                if speaker in ANSWERS and asked:
                    line = {"session_id": str(session), "input_length": asked, "output_length": len(new)}
                    out.write(json.dumps({**line, **when, "hash_ids": chain}) + "\n")
                    when = {"delay": 1000 * args.pause}
                tokens += new
                for start in range(len(chain) * size, len(tokens) - size + 1, size):
                    block = (chain[-1] if chain else -1, *tokens[start : start + size])
                    chain.append(names.setdefault(block, len(names)))


if __name__ == "__main__":
    main()

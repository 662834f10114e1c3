"""Rows of an invented support desk in three formats, to try `cplus adapt` with: python examples/rows/support_desk.py

Writes `alpaca.jsonl`, `sharegpt.jsonl` and `tools.jsonl`, 40 rows each. Kestrel Cycles, its orders and its rules do not
exist; the answers have a style of their own, so that there is something to learn.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("chain", "saddle", "front lamp", "brake pads", "pannier", "bell", "mudguard", "pedals")
ASKED = (
    (
        "How long do I have to send back the {part} I bought?",
        "30 days, unused and in its box. Start the return in your account under Orders, choose the {part}, and print "
        "the label. Refunds reach you within 5 days.",
    ),
    (
        "The {part} arrived damaged. What now?",
        "Sorry about the {part}! Please send one photo to help@kestrel.example with your order number. We ship a new "
        "one the same day; you may keep the old one.",
    ),
    (
        "Can I change the address for my {part}?",
        "Yes, until the parcel is packed. Open Orders, choose the {part}, then Edit address. Once it says Packed, "
        "write to us and we redirect it for 3 euros.",
    ),
    (
        "Does the {part} fit a Kestrel Two from 2019?",
        "Check the code inside the frame: if it begins with K2B, the {part} fits. For K2A frames order the adapter "
        "KA-7 as well; it is free with any {part}.",
    ),
    (
        "Is there a discount on the {part} for clubs?",
        "Clubs of 10 riders or more get 12 % on every {part}. Send us the club's register number once; the discount "
        "then shows at checkout.",
    ),
)
"""Questions and the desk's answers."""
STATES = (("shipped", "tomorrow"), ("packed", "on Thursday"), ("delayed", "on Monday"), ("delivered", "yesterday"))
TOOL = {
    "type": "function",
    "function": {
        "name": "order_status",
        "description": "State of an order of Kestrel Cycles.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}


def cases() -> Iterator[tuple[int, str, str, str]]:
    """The number of a case, its part, the question and the answer."""
    for number, ((question, answer), part) in enumerate(itertools.product(ASKED, PARTS)):
        yield number, part, question.format(part=part), answer.format(part=part)


def alpaca() -> Iterator[dict[str, Any]]:
    """Instruction, input and output."""
    for _, _, question, answer in cases():
        yield {"instruction": "Answer this customer of Kestrel Cycles.", "input": question, "output": answer}


def sharegpt() -> Iterator[dict[str, Any]]:
    """Conversations of two exchanges."""
    for number, part, question, answer in cases():
        more = f"Thanks! Anything else about the {part}?"
        end = f"All good. Ride safely, and note case KC-{1000 + number} if you write again."
        turns = (("human", question), ("gpt", answer), ("human", more), ("gpt", end))
        yield {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def tools() -> Iterator[dict[str, Any]]:
    """OpenAI messages in which the assistant looks an order up before it answers."""
    for number, part, _, _ in cases():
        order, (state, when) = f"KC-{2000 + 7 * number}", STATES[number % len(STATES)]
        call = {"name": "order_status", "arguments": json.dumps({"order": order})}
        said = {
            "shipped": f"Your {part} is on its way and arrives {when}.",
            "packed": f"Your {part} is packed; the van collects it {when}.",
            "delayed": f"Sorry, your {part} is late: it leaves {when}. Shipping is on us.",
            "delivered": f"Your {part} was delivered {when}. Please ask the neighbours, then write to us.",
        }[state]
        yield {
            "messages": [
                {"role": "system", "content": "You are the desk of Kestrel Cycles. Look orders up before you answer."},
                {"role": "user", "content": f"Where is my {part}? The order is {order}."},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps({"state": state})},
                {"role": "assistant", "content": said},
            ],
            "tools": [TOOL],
        }


FORMATS = {"alpaca": alpaca, "sharegpt": sharegpt, "tools": tools}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description="Write rows of an invented support desk in three formats.")
    parser.add_argument("--out", type=Path, default=Path())
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in FORMATS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows())
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder / name}.jsonl: {text.count(chr(10))} rows")


if __name__ == "__main__":
    main()

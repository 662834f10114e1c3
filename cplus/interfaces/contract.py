"""The interface of a task: how its rows become prompts, targets, candidate answers and requests for new rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cplus.data.encoded import Encoded
from cplus.data.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why a generated text is not an example of the task."""

    reason: str


class Interface(Protocol):
    """Bound to one tokenizer; pure: the same example always gives the same tokens."""

    @property
    def name(self) -> str:
        """`letter`, `cloze` or `freeform`."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer it is bound to."""
        ...

    @property
    def answer_stop(self) -> tuple[str, ...]:
        """Texts that end an answer in free text; none of them belongs to it."""
        ...

    def prompt(self, example: Example) -> tuple[int, ...]:
        """The tokens of the question alone; the answer need not be known."""
        ...

    def encode(self, example: Example) -> Encoded:
        """The prompt and the right target's tokens: what training and evidence see.

        For a conversation of several turns the target begins at the first one that is learned, so that this prompt may
        be shorter than `prompt`.
        """
        ...

    def candidates(self, example: Example) -> tuple[tuple[int, ...], ...]:
        """The tokens of each answer that can be given; empty where answers are free text."""
        ...

    def request(self, shots: Sequence[Example], topic: str | None) -> tuple[int, ...]:
        """The tokens that prompt the frozen model for one new input like the shots."""
        ...

    def stop(self, shots: Sequence[Example]) -> tuple[str, ...]:
        """Texts at which the writing of an input like the shots may stop; `parse` reads up to and with the stop."""
        ...

    def parse(self, text: str, shots: Sequence[Example]) -> Example | Rejected:
        """Read a generation into an example whose answer is not set yet (index 0 or an empty response)."""
        ...

    def with_answer(self, example: Example, answer: int | str) -> Example:
        """The example with the frozen model's own answer as its target."""
        ...

"""Requests that a model writes from nothing: it continues the bare start of its chat template, the user's turn open.

A topic line and a first word steer most requests; the topic line is not part of the request. A model without a chat
template continues plain text. Source: Xu et al. 2024, Magpie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from cplus.data.examples import Example, FreeForm, Message
from cplus.files import fingerprint
from cplus.interfaces import Interface, Rejected
from cplus.interfaces.forms import Chat, opening, special_texts
from cplus.interfaces.freeform import Freeform
from cplus.probes.abilities import GENERAL, Ability, ability
from cplus.probes.degenerate import leaks, text_flaw
from cplus.probes.settings import ProbeSettings, RequestPlan, in_turn

_TEXT_OPENERS = ("The", "In", "A", "When", "Many", "How", "It", "One")
_SENTENCE_ENDS = (". ", "? ", "! ", ".\n", "?\n", "!\n", "\n\n")


@dataclass(frozen=True, kw_only=True)
class SelfWritten:
    """Writes requests for one ability, or plain texts where the model has no chat template."""

    interface: Freeform
    settings: ProbeSettings
    block: int = 32

    @staticmethod
    def of(interface: Interface, settings: ProbeSettings) -> SelfWritten:
        """The writer of the settings' ability, if the model can show it."""
        assert settings.ability is not None
        ability(settings.ability)
        if not isinstance(interface, Freeform):
            raise ValueError(f"self-written rows are free text, but the interface is {interface.name}; use freeform")
        if settings.ability != GENERAL and not isinstance(interface.form, Chat):
            name = getattr(interface.tokenizer, "name_or_path", "") or "this model"
            raise ValueError(
                f"keeping {settings.ability} needs a chat template, and {name} has none or plain text was chosen; "
                "keep general, which is plain text then, or give a template with --chat-template"
            )
        if settings.ability == "thinking" and not interface.form.thinking:
            raise ValueError("keeping thinking needs answers with thoughts in them; add --thinking keep")
        return SelfWritten(interface=interface, settings=settings)

    @property
    def max_new_tokens(self) -> int:
        """Maximum length of a request or a text."""
        return 64 if self.chat else 96

    @cached_property
    def chat(self) -> Chat | None:
        """The chat template, if there is one."""
        return self.interface.form if isinstance(self.interface.form, Chat) else None

    @property
    def stop(self) -> tuple[str, ...]:
        """What ends a user's turn; plain text ends where the model or the limit ends it."""
        return (self._frame[1],) if self.chat else ()

    def plan(self, index: int) -> RequestPlan:
        """The topic and the first words of a request; some begin from nothing. It depends on seed and index alone."""
        seed = f"{self.settings.seed}/{self.settings.ability}"
        every = self._ability.bare
        if every and index % every == every - 1:
            return RequestPlan(index=index, shots=(), topic=None)
        steered = index - (index // every if every else 0)
        openers = self._ability.openers if self.chat else _TEXT_OPENERS
        topic = in_turn(self.settings.topics, steered, f"{seed}/topics") if self.settings.topics else None
        return RequestPlan(index=index, shots=(), topic=topic, opener=in_turn(openers, steered, f"{seed}/openers"))

    def request(self, plan: RequestPlan) -> tuple[int, ...]:
        """The tokens that the model continues."""
        if self.chat:
            about = "" if plan.topic is None else f"Topic: {plan.topic}\n\n"
            return self.chat.tokens(f"{self._frame[0]}{about}{plan.opener}")
        about = "" if plan.topic is None else f"{plan.topic.capitalize()}\n\n"
        tokenizer = self.interface.tokenizer
        return opening(tokenizer, f"{about}{plan.opener}") or (tokenizer.eos_token_id,)

    def parse(self, text: str, plan: RequestPlan) -> Example | Rejected:
        """The request or the text that was written, if it is fit to be answered."""
        whole = f"{plan.opener}{text}"
        return self._request(whole) if self.chat else self._text(whole)

    def _request(self, text: str) -> Example | Rejected:
        asked, ended, _ = text.partition(self.stop[0])
        asked = asked.strip() if ended else _whole_sentences(asked.strip())
        if any(mark in asked for mark in special_texts(self.interface.tokenizer)) or leaks(asked, self._frame[0]):
            return Rejected("template leakage")
        if (reason := text_flaw(asked)) is not None:
            return Rejected(reason)
        if not ended and not asked.endswith((".", "?", "!")):
            return Rejected("no end")
        return FreeForm(
            id=f"{self.settings.ability}-{fingerprint(asked)[:12]}",
            messages=(Message(role="user", content=asked),),
            response="",
            tools=self._ability.tools,
        )

    def _text(self, text: str) -> Example | Rejected:
        text = _whole_sentences(text.strip())
        if any(mark in text for mark in special_texts(self.interface.tokenizer)):
            return Rejected("template leakage")
        if (reason := text_flaw(text)) is not None:
            return Rejected(reason)
        return FreeForm(id=f"text-{fingerprint(text)[:12]}", messages=(), response=text)

    @property
    def _ability(self) -> Ability:
        assert self.settings.ability is not None
        return ability(self.settings.ability)

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """What the template writes before and after a user's words."""
        assert self.chat is not None
        return self.chat.asking(self._ability.tools)


def _whole_sentences(text: str) -> str:
    """The text up to its last sentence end, if that leaves half of it.

    >>> _whole_sentences("It rains. We stay at home. Tomorr")
    'It rains. We stay at home.'
    """
    end = max(text.rfind(mark) for mark in _SENTENCE_ENDS)
    return text[: end + 1].strip() if end + 1 > len(text) / 2 else text

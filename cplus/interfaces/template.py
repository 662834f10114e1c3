"""A chat template from a file, checked without a tokenizer: a broken one is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser


class _Generation(Extension):
    """Transformers' own tag around the assistant's words."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(path: Path) -> str:
    """The text of a template file; it must parse, and read the variable `messages`."""
    if not path.is_file():
        raise ValueError(
            f"{path}: expected a file with a chat template, but there is none; correct the path, or leave out "
            "chat_template to use the model's own"
        )
    try:
        text = path.read_text(encoding="utf-8")
        found = Environment(extensions=[loopcontrols, _Generation], autoescape=False).parse(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected a chat template in UTF-8, but it is no text: {error}") from error
    except TemplateSyntaxError as error:
        raise ValueError(
            f"{path}:{error.lineno}: expected a chat template in Jinja, but it does not parse: {error.message}"
        ) from error
    if "messages" not in meta.find_undeclared_variables(found):
        raise ValueError(
            f"{path}: expected a chat template, but it never reads the variable messages, so no row would be shown"
        )
    return text

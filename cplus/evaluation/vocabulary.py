"""Words that the rule for reworded answers knows: negations, number words, units, opposites, function words."""

from __future__ import annotations

from collections.abc import Iterable


def _listed(*lines: str) -> list[str]:
    return [word for line in lines for word in line.split()]


def _pairs(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    split = (word.partition("/") for word in words)
    return tuple((one, other) for one, _, other in split)


NEGATIONS = frozenset(
    _listed("no not never none nor neither without nothing nobody nowhere nicht kein keine nie pas jamais")
)
PREFIXES = ("un", "in", "im", "dis", "non", "ir", "il")
"""A word and the same word after one of these are opposites."""
NUMBER_WORDS = {
    word: str(number)
    for number, word in enumerate(
        _listed(
            "zero one two three four five six seven eight nine ten",
            "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty",
        )
    )
}
UNITS = {
    word: line.split()[0]
    for line in (
        "second seconds sec secs",
        "minute minutes min mins",
        "hour hours hr hrs",
        "day days",
        "week weeks",
        "month months",
        "year years",
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms kilo kilos",
        "mm millimetre millimetres millimeter millimeters",
        "cm centimetre centimetres centimeter centimeters",
        "m metre metres meter meters",
        "km kilometre kilometres kilometer kilometers",
        "mile miles",
        "litre litres liter liters",
        "celsius °c",
        "fahrenheit °f",
        "percent % percentage",
        "dollar dollars $ usd",
        "euro euros € eur",
        "pound pounds £ gbp",
        "byte bytes",
        "kb kilobyte kilobytes",
        "mb megabyte megabytes",
        "gb gigabyte gigabytes",
    )
    for word in line.split()
}
"""Each spelling of a unit, and the spelling it is compared by."""
OPPOSITES = _pairs(
    _listed(
        "true/false right/wrong correct/incorrect good/bad better/worse best/worst increase/decrease",
        "increases/decreases rise/fall rises/falls up/down high/low higher/lower highest/lowest more/less more/fewer",
        "most/least big/small large/small larger/smaller largest/smallest long/short longest/shortest hot/cold",
        "warm/cool open/closed opens/closes on/off before/after early/late earlier/later always/never allow/forbid",
        "allowed/forbidden accept/reject accepted/rejected safe/dangerous strong/weak stronger/weaker push/pull",
        "pushes/pulls add/remove add/subtract buy/sell win/lose won/lost start/stop begin/end above/below",
        "inside/outside left/right first/last old/new old/young fast/slow faster/slower easy/hard cheap/expensive",
        "positive/negative maximum/minimum male/female north/south east/west success/failure enable/disable",
        "enabled/disabled required/optional like/dislike with/without",
    )
)
FUNCTION = frozenset(
    _listed(
        "a an the this that these those there here it its he she they them their his her we us our you your i me my",
        "is are was were be been being am do does did has have had will would shall should can could may might must",
        "of in on at to from by with for as into over under about than then and or but so if because while when which",
        "who whom whose what where how also just very really quite too more most much many some any each every all",
        "both such own other only up out off again d s t",
        "et der die das ein eine ist sind und le la les un une est sont de des du je",
        # Words of politeness, of announcing an answer and of rounding.
        "sure certainly course yes please thank thanks hello hi dear customer sorry apologise apologize apologies",
        "regards glad welcome answer let know message reaching reach further approximately roughly degrees degree",
    )
)
"""Words that carry no content of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.worker.text.stop_strings import StopStrings


def run(strings: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stop = StopStrings(strings, include=include)
    output = ""
    for piece in pieces:
        text, hit = stop.add(piece)
        output += text
        if hit is not None:
            return output, hit
    return output + stop.flush(), None


def expected(strings: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The answer when the whole text is looked at after every character, as a reader of the rule would."""
    for end in range(1, len(text) + 1):
        hits = [(text[:end].find(s), i, s) for i, s in enumerate(strings) if s in text[:end]]
        if hits:
            at, _, string = min(hits)
            return text[: at + len(string) if include else at], string
    return text, None


letters = st.text(alphabet="ab", max_size=12)


@given(st.lists(letters.filter(bool), max_size=3), letters, st.booleans())
def test_piecewise_equals_the_rule_applied_to_the_whole(strings: list[str], text: str, include: bool) -> None:
    assert run(strings, list(text), include=include) == expected(strings, text, include)


@given(st.lists(letters.filter(bool), min_size=1, max_size=3), letters)
def test_shown_text_is_never_retracted_or_lost(strings: list[str], text: str) -> None:
    stop = StopStrings(strings, include=False)
    output = ""
    for character in text:
        piece, hit = stop.add(character)
        output += piece
        assert text.startswith(output)
        if hit is not None:
            return
    assert output + stop.flush() == text


def test_only_a_possible_stop_string_is_held_back() -> None:
    stop = StopStrings(["END"], include=False)
    assert stop.add("the E") == ("the ", None)
    assert stop.add("x") == ("Ex", None)
    assert stop.add("EN") == ("", None)
    assert stop.add("D!") == ("", "END")

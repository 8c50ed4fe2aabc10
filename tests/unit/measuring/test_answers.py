"""Where two answers part."""

from __future__ import annotations

from moestream.measuring.answers import Answer, Difference, Part, first_difference


def answer(*parts: tuple[int, int, str], end: str = "") -> Answer:
    made = tuple(Part(*part) for part in parts)
    return Answer(made, tuple(float(i) for i in range(len(made))), (), "".join(part.text for part in made) + end, {})


A = answer((1, 5, "a"), (2, 6, "b"), (4, 8, "ü"))


def test_the_same() -> None:
    again = answer((1, 5, "a"), (2, 6, "b"), (4, 8, "ü"))
    assert first_difference(A, again) is None
    assert A.sha256 == again.sha256


def test_the_first_token_that_differs() -> None:
    other = answer((1, 5, "a"), (2, 7, "B"), (4, 9, "x"))
    found = first_difference(A, other)
    assert found == Difference(2, Part(2, 6, "b"), Part(2, 7, "B"))
    assert str(found) == "token 2: 6 'b' and 7 'B'"
    assert A.sha256 != other.sha256
    same_text = answer((1, 5, "a"), (2, 7, "b"), (4, 8, "ü"))
    assert first_difference(A, same_text) is not None and A.sha256 != same_text.sha256, "ids count too"


def test_one_ends_early() -> None:
    short = answer((1, 5, "a"), (2, 6, "b"))
    assert str(first_difference(A, short)) == "token 4: 8 'ü' and nothing"
    assert first_difference(short, A, 2) is None
    assert first_difference(short, answer((1, 5, "a"), (2, 6, "c"), (3, 1, "d")), 2) is not None
    # the shorter answer ended in the middle of a character, whose bytes it sends on their own
    assert first_difference(answer((1, 5, "a"), (2, 6, "b"), (3, 7, "\ufffd")), A, 3) is None


def test_a_rest_without_a_token_counts() -> None:
    assert first_difference(A, answer((1, 5, "a"), (2, 6, "b"), (4, 8, "ü"), end="!")) is not None


def test_the_servers_own_times_go_first() -> None:
    late = Answer(A.parts, (1.0, 1.0, 1.0), (0.1, 0.2, 0.4), A.text, {})
    assert late.arrivals == [(1, 0.1), (2, 0.2), (4, 0.4)]
    assert A.arrivals == [(1, 0.0), (2, 1.0), (4, 2.0)]

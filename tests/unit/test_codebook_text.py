"""Calibration text: varied, the same again, and without a line of what quality is measured on."""

import pytest

from lowbit_attn.codebooks import text

pieces = list(text.mixture())


class Characters:
    """A tokenizer of one token a character, and one at the start."""

    def __call__(self, written: str, add_special_tokens: bool = True):
        ids = [0] * add_special_tokens + [ord(c) for c in written]
        return type("Encoding", (), {"input_ids": ids})


def lines(written: str) -> set[str]:
    return {line.strip() for line in written.splitlines()} - {""}


def test_no_line_is_shared_with_the_demos_text():
    demo = text.help_text()
    assert len(lines(demo)) > 1000
    assert not lines("".join(pieces)) & lines(demo)


def test_the_demo_reads_what_is_excluded():
    scoring = pytest.importorskip("lowbit_attn.demo.scoring")
    assert scoring.help_text is text.help_text and scoring.help_text() == text.help_text(text.TOPICS)


def test_another_text_can_be_excluded():
    line = next(line for line in pieces[0].splitlines() if len(line) > 40).strip()
    assert line not in lines("".join(text.mixture(exclude=f"  {line}\n")))
    assert line in lines("".join(pieces))


def test_kinds_take_turns():
    """Topics, sources and licences: a third of each in any part of the mixture's beginning."""
    topics, sources, licences = text._other_topics(), text._sources(), text._licences()
    assert len(topics) > 20 and len(sources) > 5 and len(licences) > 3
    for turn in range(4):
        for kind, piece in zip((topics, sources, licences), pieces[3 * turn :], strict=False):
            assert 0 < len(piece) < 2 * text.PIECE_CHARACTERS
            longest = max(piece.splitlines(), key=len).strip()
            assert any(longest in document for document in kind)


def test_enough_for_any_calibration_and_the_same_again():
    assert sum(map(len, pieces)) > 500_000
    assert pieces == list(text.mixture())


def test_licences_are_there_once():
    titles = [text._title(one) for one in text._licences()]
    assert len(titles) == len(set(titles))


def test_tokens_are_cut_and_begin_once():
    ids = text.tokenized(Characters(), ["a" * 700, "b" * 700], 1200)
    assert ids.tolist() == [0] + [ord("a")] * 700 + [ord("b")] * 499


def test_short_text_is_refused():
    with pytest.raises(ValueError, match="got 1023 tokens, supported: 1024 or more"):
        text.tokenized(Characters(), ["a" * 1022], 8192)
    assert len(text.tokenized(Characters(), ["a" * 1023], 8192)) == 1024


def test_files(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("é", encoding="utf-8")
    bad.write_bytes(b"\xff\xfe\x00")
    assert list(text.read_files([good])) == ["é"]
    with pytest.raises(ValueError, match="bad.txt' is in UTF-16"):
        list(text.read_files([bad]))

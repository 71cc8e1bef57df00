"""Text files of users: UTF-8 is read, anything else is one sentence that names the file and, where it shows, why."""

import pytest

from lowbit_attn import text_file
from lowbit_attn.text_file import TextFileError

PROSE = "the quick brown fox jumps over the lazy dog. café naïve über. " * 40


def written(folder, data: bytes):
    path = folder / "text.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("data", [PROSE.encode(), PROSE.encode("utf-8-sig"), "日本語のテキスト。\n".encode(),
                                  "a\r\nb\rc\x0cd\x1b[0m".encode()])
def test_utf_8_is_read(tmp_path, data):
    want = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    assert text_file.read(written(tmp_path, data)) == want


@pytest.mark.parametrize("encoding, words", [
    ("utf-16", "is in UTF-16"), ("utf-16-le", "is in UTF-16"), ("utf-16-be", "is in UTF-16"),
    ("utf-32", "is in UTF-32"), ("utf-32-le", "is in UTF-32"), ("latin-1", "is not in UTF-8 (byte 0xe9 at 48"),
    ("cp1252", "is not in UTF-8"),
    ("cp437", "is not in UTF-8"), ("mac-roman", "is not in UTF-8")])
def test_other_encodings_are_named(tmp_path, encoding, words):
    with pytest.raises(TextFileError) as raised:
        text_file.read(written(tmp_path, PROSE.encode(encoding)))
    message = str(raised.value)
    assert "text.txt" in message and words in message and "supported: text in UTF-8; iconv" in message


@pytest.mark.parametrize("encoding", ["shift-jis", "euc-jp", "iso-2022-jp", "gb18030", "big5"])
def test_encodings_of_east_asia_are_refused(tmp_path, encoding):
    with pytest.raises(TextFileError, match="UTF-8"):
        text_file.read(written(tmp_path, ("日本文字。" * 50).encode(encoding, "replace")))


@pytest.mark.parametrize("data, words", [
    (b"", "is empty"), (b"\xef\xbb\xbf", "is empty"), (bytes(range(256)) * 20, "no text"), (b"abc\0def", "zero bytes"),
    (bytes(range(1, 256)) * 20, "no text"), (b"\x80" * 100, "not in UTF-8")])
def test_what_is_no_text_is_refused(tmp_path, data, words):
    with pytest.raises(TextFileError, match=f"text: .*text.txt.* {words}"):
        text_file.read(written(tmp_path, data))


def test_what_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.txt", tmp_path / "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(TextFileError, match="document: got .*supported: a text file"):
            text_file.read(path, "document")

"""Reads text files of users: UTF-8, with or without a mark; one sentence for a file of anything else."""

import codecs
from pathlib import Path

from lowbit_attn.errors import TextFileError

# A mark of UTF-32 begins with that of UTF-16, so it is looked for first.
MARKS = ((codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
         (codecs.BOM_UTF16_BE, "UTF-16"))
TEXT_CONTROLS = frozenset(b"\a\b\t\n\v\f\r\x1b")  # control characters that occur in text
ISO_2022 = (b"\x1b$B", b"\x1b$@", b"\x1b$A", b"\x1b$)")  # escapes that begin East Asian characters in 7 bit


def read(path: Path, name: str = "text") -> str:
    """The text of a file, without a mark and with line ends as \\n; name: the argument that the message begins with."""
    path = Path(path)
    try:
        data = path.read_bytes() if path.is_file() else None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise TextFileError(f"{name}: got {str(path)!r}, which cannot be read ({reason}), supported: a text file"
                            ) from None
    if data is None:
        raise TextFileError(f"{name}: got {str(path)!r}, supported: a text file")
    text, encoding = _decoded(data)
    if encoding:
        raise TextFileError(f"{name}: {str(path)!r} is {encoding}, supported: text in UTF-8{_remedy(encoding)}")
    if not text:
        raise TextFileError(f"{name}: {str(path)!r} is empty, supported: a text file in UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _decoded(data: bytes) -> tuple[str, str]:
    """(the text, what the data are instead if they are not UTF-8, else "")."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return "", f"in {encoding}"
    if b"\0" in data:
        return "", _with_zeros(data)
    if any(escape in data for escape in ISO_2022):
        return "", "in ISO-2022"
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start:,}"
        controls = sum(byte < 32 and byte not in TEXT_CONTROLS for byte in data)
        if controls * 100 > len(data):
            return "", f"no text ({found}, and control characters)"
        return "", f"not in UTF-8 ({found}: perhaps Latin-1 or another encoding of one country)"


def _with_zeros(data: bytes) -> str:
    """What data with zero bytes are: text of wide characters has them at the same places of each character."""
    for width, encoding in ((4, "UTF-32"), (2, "UTF-16")):
        if len(data) % width == 0:
            for order in ("le", "be"):
                try:
                    text = data.decode(f"{encoding.lower()}-{order}")
                except UnicodeDecodeError:
                    continue
                if sum(character.isprintable() or character.isspace() for character in text) == len(text):
                    return f"in {encoding}"
    return "no text (it has zero bytes)"


def _remedy(encoding: str) -> str:
    known = encoding.removeprefix("in ")
    if known.startswith("no text"):
        return ""
    return f"; iconv -f {known if known.startswith('UTF') else 'ENCODING'} -t UTF-8 converts a file"

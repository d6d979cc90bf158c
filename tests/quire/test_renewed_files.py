"""Values made of files: made anew once the files have changed, and kept while they cannot be used."""

import os
from pathlib import Path
from threading import Thread

import pytest

from quire.renewed_files import RenewedFiles


class Pair:
    """Two files that belong together: their texts must be equal."""

    def __init__(self, folder: Path) -> None:
        self.files = [folder / "one", folder / "two"]
        self.num_made = 0
        self.said: list[str] = []
        self.put("first")

    def put(self, *texts: str) -> None:
        for file, text in zip(self.files, texts * (2 // len(texts)), strict=True):
            beside = file.with_suffix(".new")
            beside.write_text(text)
            beside.replace(file)

    def make(self) -> str:
        self.num_made += 1
        one, two = (file.read_text() for file in self.files)
        if one != two:
            raise ValueError(f"{one} and {two} do not fit")
        return one

    def renewed(self) -> RenewedFiles[str]:
        return RenewedFiles(
            self.files,
            self.make,
            on_renewed=lambda: self.said.append("renewed"),
            on_refused=lambda error: self.said.append(type(error).__name__),
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_files_are_read_again_only_when_they_have_changed(pair: Pair) -> None:
    made = pair.renewed()
    first = made.latest()
    assert first == "first" and made.latest() is first and pair.num_made == 1
    pair.put("other")
    assert made.latest() == made.latest() == "other" and (pair.num_made, pair.said) == (2, ["renewed"])


def test_files_of_the_same_size_and_time_are_told_apart(pair: Pair) -> None:
    made = pair.renewed()
    before = [file.stat() for file in pair.files]
    pair.put("FIRST")
    for file, was in zip(pair.files, before, strict=True):
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert made.latest() == "FIRST"


def test_what_does_not_fit_is_refused_once_and_the_value_before_is_kept(pair: Pair) -> None:
    made = pair.renewed()
    pair.put("new", "old")
    assert [made.latest() for _ in range(3)] == ["first"] * 3 and pair.said == ["ValueError"]
    pair.put("new")
    assert made.latest() == "new" and pair.said == ["ValueError", "renewed"]
    pair.put("new", "older")
    assert made.latest() == "new" and pair.said == ["ValueError", "renewed", "ValueError"]


def test_files_that_are_missing_for_a_while_are_refused_once(pair: Pair) -> None:
    made = pair.renewed()
    pair.files[0].unlink()
    assert [made.latest() for _ in range(3)] == ["first"] * 3 and pair.said == ["FileNotFoundError"]
    pair.put("back")
    assert made.latest() == "back"


def test_files_that_change_while_they_are_read_are_read_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair.renewed()
    pair.put("second")
    make = pair.make

    def late() -> str:
        found = make()
        pair.put("third")
        return found

    monkeypatch.setattr(made, "_make", late)
    assert made.latest() == "first"
    monkeypatch.setattr(made, "_make", make)
    assert made.latest() == "third" and pair.said == ["renewed"]


def test_what_cannot_be_used_yet_is_used_once_it_can(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pair.renewed()
    pair.put("of tomorrow")

    def too_early() -> str:
        raise ValueError("not valid yet")

    monkeypatch.setattr(made, "_make", too_early)
    assert made.latest() == made.latest() == "first" and pair.said == ["ValueError"]
    monkeypatch.setattr(made, "_make", pair.make)
    assert made.latest() == "of tomorrow"


def test_a_mounted_secret_that_is_replaced_as_a_whole_is_seen(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cert").write_text(name)
    (tmp_path / "now").symlink_to("one")
    (tmp_path / "cert").symlink_to("now/cert")
    made = RenewedFiles([tmp_path / "cert"], (tmp_path / "cert").read_text)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "now")
    assert made.latest() == "two"


def test_the_first_value_is_made_or_the_reason_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RenewedFiles([tmp_path / "none"], (tmp_path / "none").read_text)


def test_threads_get_one_value_and_make_it_once(pair: Pair) -> None:
    made = pair.renewed()
    pair.put("other")
    found: list[str] = []
    threads = [Thread(target=lambda: found.append(made.latest())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1 and pair.num_made == 2 and pair.said == ["renewed"]

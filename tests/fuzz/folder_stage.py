"""Damaged model folders: one line and exit code 2, from a worker's check (or none and 0) and from `quire serve`."""

import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.outcome import Outcome, Stage
from tests.patience import patient
from tests.quire.damaged_service import faults_of_serving
from tests.services import ROOT
from tests.worker.damaged_folders import FAMILIES, Damage, damages, random_damage, spoilt_copy, write_sound_folder

CHECK_S = 10.0  # that a check may take on an idle machine; most take under one
AT_ONCE = 2
RANDOM_SHARE = 0.5  # of the folders; the others are drawn from the kinds that are listed


async def damage_folders(num_inputs: int, seed: int) -> Outcome:
    """Folders of all families in turn."""
    outcome = Outcome("damaged model folders")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as place:
        room = asyncio.Semaphore(AT_ONCE)
        sound = {family: write_sound_folder(family, Path(place) / family) for family in FAMILIES}
        listed = {family: list(damages(folder)) for family, folder in sound.items()}

        async def check(number: int) -> None:
            family = FAMILIES[number % len(FAMILIES)]
            is_random = rng.random() < RANDOM_SHARE
            damage = random_damage(sound[family], rng.randrange(1 << 30)) if is_random else rng.choice(listed[family])
            async with room:
                folder = spoilt_copy(sound[family], damage, Path(place) / f"spoilt-{number}")
                await _check(folder, family, damage, outcome)
                shutil.rmtree(folder, ignore_errors=True)

        await asyncio.gather(*(check(number) for number in range(num_inputs)))
    return outcome


async def _check(folder: Path, family: str, damage: Damage, outcome: Outcome) -> None:
    command = [sys.executable, "-m", "worker_svc", "--check", "--model", str(folder), "--device", "cpu"]
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    about = f"{family}, {damage.name}"
    try:
        async with asyncio.timeout(patient(CHECK_S)):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        outcome.fail(f"{about}: no end within {patient(CHECK_S):.0f} s")
        return
    outcome.num_inputs += 1
    outcome.answers[f"exit {process.returncode}"] += 1
    longest = outcome.figures.get("longest_s", 0.0)
    outcome.figures["longest_s"] = round(max(longest, time.monotonic() - began_s), 2)
    lines = said.decode(errors="replace").splitlines()
    if process.returncode == 0:  # a folder may be sound and odd
        lines = [each for each in lines if not each.startswith("worker: warning: ")]
    if (process.returncode, len(lines)) not in ((0, 0), (2, 1)) or "Traceback" in said.decode(errors="replace"):
        outcome.fail(f"{about}: exit {process.returncode}, {len(lines)} lines: {lines[-1:]}")
    elif damage.is_fatal and process.returncode == 0:
        outcome.fail(f"{about}: passed")


async def serve_damaged(num_inputs: int, seed: int) -> Outcome:
    """Serve damaged folders by `quire serve`."""
    outcome = Outcome("damaged model folders, by quire serve")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as place:
        sound = {family: write_sound_folder(family, Path(place) / family) for family in FAMILIES}
        fatal = {family: [each for each in damages(folder) if each.is_fatal] for family, folder in sound.items()}
        for number in range(num_inputs):
            family = FAMILIES[number % len(FAMILIES)]
            damage = rng.choice(fatal[family])
            folder = spoilt_copy(sound[family], damage, Path(place) / "spoilt")
            wrong = await asyncio.to_thread(faults_of_serving, folder)
            for fault in wrong:
                outcome.fail(f"{family}, {damage.name}: {fault}")
            outcome.answers["other" if wrong else "one line and exit 2"] += 1
            outcome.num_inputs += 1
            shutil.rmtree(folder, ignore_errors=True)
    return outcome


STAGES = (
    Stage(name="folders", num_inputs=200, play=damage_folders),
    Stage(name="served-folders", num_inputs=60, play=serve_damaged),
)

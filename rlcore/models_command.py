"""``paceline models``: what lies in the home folder; make or verify the embedded model."""

from __future__ import annotations

from pydantic import Field

from rlcore.errors import PacelineError
from rlcore.home import Home
from rlcore.models import EMBEDDED_NAME, RECORD, embedded_model, verify
from rlcore.settings import CommonSettings, load
from rlcore.weights import WeightStore


class ModelsSettings(CommonSettings):
    """List the models and drafts in the home folder."""

    make: bool = Field(False, description="Make the embedded model if it is not there")
    verify: bool = Field(False, description="Read every file of the embedded model and check it")


def main(argv: list[str]) -> int:
    settings = load(ModelsSettings, argv, "paceline models")
    home = Home(settings.home)
    if settings.make:
        embedded_model(home)
    if settings.verify:
        _verify(home)
    for folder in sorted(p for p in home.models.glob("[!.]*") if (p / "config.json").exists()):
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"model  {folder.name}  {size / 2**20:,.0f} MiB")
    for root in sorted(p for p in home.drafts.iterdir() if p.is_dir()):
        for manifest in WeightStore(root).manifests():
            length = manifest.heldout_length
            measured = "" if length is None else f"  held-out length {length:.2f}"
            print(f"draft  {root.name}  version {manifest.version}  {manifest.origin}{measured}")
    return 0


def _verify(home: Home) -> None:
    folder = home.models / EMBEDDED_NAME
    if not (folder / RECORD).exists():
        raise PacelineError("the embedded model is not there; make it with: paceline models --make")
    if damaged := verify(folder):
        raise PacelineError(
            f"damaged: {', '.join(damaged)}; delete {folder} and run: paceline models --make"
        )

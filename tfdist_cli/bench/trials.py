"""The trainings that advice is drawn from: the settings as they are, one process, and each candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tfdist_cli.bench.candidates import Candidate, candidates_of
from tfdist_cli.bench.measure import Rate
from tfdist_cli.bench.results import Row
from tfdist_cli.bench.variants import Variant, variants_of, workers_in
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe

AS_IT_IS = "as they are"


@dataclass
class Trial:
    """A training that is measured repeatedly.

    Args:
        name: its name in tables.
        variant: its cluster.
        recipe: its recipe.
        candidate: the settings that differ; None for the settings as they are, and for one process.
        rates: one per run.
        error: why it failed; empty if it did not.
    """

    name: str
    variant: Variant
    recipe: Recipe
    candidate: Candidate | None = None
    rates: list[Rate] = field(default_factory=list)
    error: str = ""

    @property
    def row(self) -> Row:
        """Its measurements; at least one."""
        return Row(self.name, self.variant.workers, self.variant.alone, tuple(self.rates), None)


def trials_of(
    cluster: Cluster, recipe: Recipe, load: Callable[[Sequence[str]], tuple[Cluster, Recipe | None]]
) -> list[Trial]:
    """Returns the trials: first the settings as they are, then one process if the cluster is not one, then candidates.

    Args:
        cluster: the cluster as it is.
        recipe: the recipe as it is.
        load: reads both with changes, as `--set` takes them.
    """
    base, *alone = variants_of(cluster, recipe, [workers_in(cluster)])
    trials = [Trial(AS_IT_IS, base, recipe), *(Trial(variant.name, variant, recipe) for variant in alone)]
    for candidate in candidates_of(base.cluster, recipe):
        changed, trained = load(candidate.changes)
        if trained is not None:
            variant = variants_of(changed, trained, [workers_in(changed)])[0]
            trials.append(Trial(candidate.name, variant, trained, candidate))
    return trials

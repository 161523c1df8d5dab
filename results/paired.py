"""Paired tests of the studies, which fix them before their runs.

Runs of one seed share the data and its order, and methods draw equal initial weights. So differences are taken within
seeds.
"""

from collections.abc import Collection
from typing import NamedTuple

from scipy import stats

from scripts.reproduce.comparisons import difference_cell, holm
from scripts.reproduce.study import BySeed
from scripts.shared.looks import series_name
from scripts.shared.tables import markdown_table, mean_and_stderr


class PairedTests(NamedTuple):
    """Tests of one series against its rivals in each measure. Holm's correction covers all of them."""

    title: str
    ours: str
    rivals: list[str]
    measures: dict[str, dict[str, BySeed]]  # by label, then by series
    unit: str  # of the measures
    left_out: Collection[int] = ()  # seeds that were known when the tests were fixed
    note: str = ""

    def rows(self) -> list[dict]:
        """Return a row per test: measure, rival, mean difference, its standard error, p-values, seeds.

        Two seeds are the least for a test. A test with fewer has p = 1 in the correction, and no row.
        """
        rows = []
        for measure, values in self.measures.items():
            ours = values.get(self.ours, {})
            for rival in self.rivals:
                others = values.get(rival, {})
                seeds = sorted(ours.keys() & others.keys() - {*self.left_out})
                if len(seeds) > 1:
                    differences = [ours[seed] - others[seed] for seed in seeds]
                    rows.append({"measure": measure, "rival": rival, "seeds": len(seeds)} | paired_t_test(differences))
        untested = len(self.measures) * len(self.rivals) - len(rows)
        corrected = holm([row["p"] for row in rows] + [1.0] * untested)
        return [row | {"p_holm": p} for row, p in zip(rows, corrected)]

    def section(self) -> list[str]:
        """Return a section with the tests, [] without tests."""
        rows = self.rows()
        if not rows:
            return []
        table = [["minus", "measure", "seeds", "difference"]]
        for row in rows:
            table.append([series_name(row["rival"]), row["measure"], str(row["seeds"]), difference_cell(row)])
        tests = len(self.measures) * len(self.rivals)
        text = f"{series_name(self.ours)} minus each rival, in {self.unit}: mean difference within seeds "
        text += f"\u00b1 standard error. p: paired t-test after Holm's correction for {tests} tests. {self.note}"
        return [f"### {self.title}", text, markdown_table(table)]


def paired_t_test(differences: list[float]) -> dict[str, float]:
    """Return the mean of the differences, its standard error, and the two-sided p-value."""
    mean, stderr = mean_and_stderr(differences)
    # Equal differences, such as 0 when neither method copies, have no t-test.
    p = float(stats.ttest_1samp(differences, 0).pvalue) if stderr else float(mean == 0)
    return {"difference": mean, "stderr": stderr, "p": p}


def at(values: dict[tuple, BySeed], key) -> dict[str, BySeed]:
    """Return {series: BySeed} of this key."""
    return {series: by_seed for (series, other), by_seed in values.items() if other == key}

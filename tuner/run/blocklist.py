"""Configs that a run leaves alone because they have cost two workers; the policy is `tuned_db.policy.blocklist`."""

from __future__ import annotations

from flashtune.codegen.plan.config import Config
from flashtune.codegen.problem.problem import Spec
from flashtune.tuned_db.lookup.lookup import source_digest
from flashtune.tuned_db.policy.blocklist import KILLS
from flashtune.tuned_db.records.measurement import Measurement, Variant
from flashtune.tuned_db.store.store import Store


class Blocklist:
    """What is stored in ``store`` and counts on a device model, and what the run adds to it. ``met`` are the configs
    that it was asked about."""

    def __init__(self, store: Store, gpu_key: str) -> None:
        self.met: set[tuple[Spec, Config]] = set()
        self._store = store
        self._gpu_key = gpu_key
        self._variants: dict[Spec, frozenset[Variant]] = {}
        self._names: dict[Spec, set[tuple[str, str]]] = {}

    def holds(self, spec: Spec, config: Config) -> bool:
        """Whether ``config``, as it is rendered today, is blocklisted for ``spec``."""
        if spec not in self._variants:
            self._read(spec)
        if not self._variants[spec]:
            return False
        name = config.family, config.key
        if name not in self._names[spec] or (*name, source_digest(spec, config)) not in self._variants[spec]:
            return False
        self.met.add((spec, config))
        return True

    def grown(self, row: Measurement) -> bool:
        """Whether ``row``, which has just been stored, blocklists its config."""
        if row.status not in KILLS:
            return False
        self._read(row.problem.spec)
        return self.holds(row.problem.spec, row.config)

    def _read(self, spec: Spec) -> None:
        self._variants[spec] = self._store.blocklisted(spec, self._gpu_key)
        self._names[spec] = {each[:2] for each in self._variants[spec]}

"""Bulk prediction on a Ray cluster: images to polygons by Ray Data, each image once.

    tasks → read ×CPUs → score ×GPUs, warm networks → write ×CPUs → outcomes → here

bulk.py has the steps, conductor.py runs them in the cluster. Results in a store are written where they are
made; those for a directory of this machine come here and are written here. An image is finished when its record is
there: the same command again reads every image, compares hashes, and predicts only what is missing or changed.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brim.cluster.conductor import Plan, Resources, Told, conducted, raise_if_told
from brim.cluster.ray_connect import Node, RayCluster, connect, import_ray
from brim.engine.device import format_size
from brim.engine.meter import ceiling_share
from brim.engine.storage import Place, place_of
from brim.errors import BrimError, ClusterError, ConfigError
from brim.segmentation.images import ImageFile
from brim.segmentation.images.writing import Writer
from brim.segmentation.prediction import (
    FOLDER,
    BulkImage,
    BulkParcel,
    BulkScorer,
    BulkTask,
    FilesReport,
    PredictProgress,
    PredictReport,
    Recipe,
    Record,
    Records,
    find_inputs,
    pack_weights,
    recipe_name,
    split_tasks,
)
from brim.segmentation.tuning import BatchSizes

SHARE = 0.25  # of a core for a step beside the network, where the network runs on the same cores
NODE_BYTES = 2**30  # of memory free on each node: a process of each step and a few parcels
SEE_S = 60.0  # for a node to say whether it sees the images
_GATHERERS = 16  # parts of a COCO file asked for at once


def predict_many(
    inputs: Sequence[Path | str],
    out: Path | str,
    recipe: Recipe,
    weights: Path | str,
    address: str,
    *,
    batch_sizes: Path | str | None = None,
    allow_mixed: bool = False,
    progress: Callable[[PredictProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> FilesReport:
    """What predict_files does, on the cluster at that address; images whose record and bytes agree are kept.

    batch_sizes is the file that is read and added to, as ModelLoader does it; allow_mixed takes GPUs of several types,
    whose results may differ in their last bits.
    """
    if recipe.device not in ("auto", "cpu"):
        raise ConfigError(
            "is one device",
            field="device",
            value=recipe.device,
            code="conflict",
            hint="on a cluster use auto or cpu",
        )
    images = {str(image): image for image in find_inputs(inputs, out)}
    packed = pack_weights(recipe.model, weights)
    sizes = BatchSizes.read(batch_sizes).as_json() if batch_sizes is not None else None  # a broken file is named now
    place = place_of(out)
    with connect(address) as cluster:
        check_nodes(cluster.nodes)
        if recipe.device == "auto" and not allow_mixed:
            check_alike(import_ray().nodes())
        _check_seen(cluster, images.values())
        with Writer(out, recipe.files.format, list(images)) as writer:
            records = Records(place, _recipe_name(recipe, packed))
            run = _Run(images, writer, place, records, recipe, progress, stop)
            try:
                run.work(cluster, packed, _text(sizes), batch_sizes)
            finally:
                if recipe.files.format == "coco":
                    run.gather()
    return run.report()


def _recipe_name(recipe: Recipe, weights: bytes) -> str:
    """All that results depend on; not the batch size, by which none may differ but in the last bit."""
    files = asdict(recipe.files)
    shared = {name: files.pop(name) for name in ("precision", "tile", "resize", "overlap")}
    del files["batch_size"]
    facts = {"files": files, "device": recipe.device, **shared}  # in this form since the first version
    return recipe_name({**facts, "weights": hashlib.sha256(weights).hexdigest()})


def _text(sizes: Any) -> str | None:
    return None if sizes is None else json.dumps(sizes)


class _Run:
    """One call: what was asked for, and what came back so far."""

    def __init__(
        self,
        images: dict[str, ImageFile],
        writer: Writer,
        place: Place,
        records: Records,
        recipe: Recipe,
        progress: Callable[[PredictProgress], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self._images, self._writer, self._place, self._records = images, writer, place, records
        self._recipe, self._progress, self._stop = recipe, progress, stop
        self._total = len(images)
        self._sheets: dict[int, BulkImage] = {}  # what came back, by index
        self._parcels: list[BulkParcel] = []  # their accounts
        self._seconds = 0.0
        self._workers = 0
        self._batch_size = 1
        self._stopped = False

    def work(self, cluster: RayCluster, weights: bytes, sizes: str | None, sizes_file: Path | str | None) -> None:
        """Predict what is missing."""
        ray = import_ray()
        resources = _resources(cluster, self._recipe)
        if self._recipe.needs_tuning:
            self._batch_size, tuned = _tuned(ray, resources.score, self._recipe, weights, sizes)
            if tuned is not None and tuned != sizes and sizes_file is not None:
                _save(tuned, sizes_file)
            sizes = tuned
        work = split_tasks(self._tasks(), self._batch_size, resources.num_scorers)
        plan = Plan(
            work=work,
            recipe=self._recipe,
            sizes=sizes,
            place=None if self._place.path is not None else self._place,
            records=self._records,
            resources=resources.at_most(len(work)),
        )
        self._workers = plan.resources.num_scorers
        began_s = time.perf_counter()
        with conducted(ray, plan, weights) as outcomes:
            self._take(outcomes, began_s)
        self._seconds = time.perf_counter() - began_s
        if not self._stopped and len(self._sheets) != self._total:  # never a short result without a word
            raise RuntimeError(f"{self._total} images went and {len(self._sheets)} came back; this is a bug in brim")

    def _tasks(self) -> list[BulkTask]:
        """All images, each with its record where its result is there too."""
        done, coco = self._records.open(), self._recipe.files.format == "coco"
        there = set(self._place.walk()) if done and coco else set[str]()
        tasks = []
        for index, (name, image) in enumerate(self._images.items()):
            file = self._file(name)
            has = name in done and (file in there if coco else self._writer.has(name))
            known = done[name] if has else None
            tasks.append(BulkTask(index=index, name=name, image=_absolute(image), file=file, done=known))
        return tasks

    def _file(self, name: str) -> str:
        """Where an image's result goes; of a COCO file, its part."""
        if self._recipe.files.format != "coco":
            return self._writer.file(name)
        return f"{FOLDER}/coco/{hashlib.sha256(name.encode()).hexdigest()}.jsonl"

    # What comes back

    def _take(self, outcomes: Iterator[BulkParcel | None], began_s: float) -> None:
        failed = 0
        for parcel in outcomes:
            if parcel is not None:
                failed += sum(sheet.error is not None for sheet in parcel.sheets)
                self._keep(parcel)
            if self._progress is not None:
                done = len(self._sheets)
                rate = done / max(time.perf_counter() - began_s, 1e-9)
                self._progress(PredictProgress(done=done, failed=failed, total=self._total, rate=rate))
            if self._stop is not None and self._stop():
                self._stopped = True
                return

    def _keep(self, parcel: BulkParcel) -> None:
        """Write what was not written where it was made, and count."""
        fresh: list[Record] = []
        for sheet in parcel.sheets:
            if sheet.index in self._sheets:
                raise RuntimeError(f"{sheet.name} came back twice; this is a bug in brim")
            if sheet.result is not None and self._place.path is not None:
                self._put(sheet, sheet.result)
                fresh.append(sheet.record())
            sheet.result = None
            self._sheets[sheet.index] = sheet
        self._records.add(fresh)
        self._parcels.append(parcel)

    def _put(self, sheet: BulkImage, result: bytes) -> None:
        if self._recipe.files.format == "coco":
            self._place.put_bytes(result, sheet.file)
        else:
            self._writer.put(sheet.name, result)

    def gather(self) -> None:
        """Put the parts of a COCO file together."""
        whole = [sheet for sheet in self._sheets.values() if sheet.error is None]
        with ThreadPoolExecutor(_GATHERERS) as pool:
            for start in range(0, len(whole), _GATHERERS):
                some = whole[start : start + _GATHERERS]
                for sheet, lines in zip(
                    some, pool.map(lambda sheet: self._place.read_bytes(sheet.file), some), strict=True
                ):
                    self._writer.put_lines(sheet.name, (sheet.height, sheet.width), lines)

    def report(self) -> FilesReport:
        """By the names of one machine's report; seconds are those of the cluster, starting workers included."""
        sheets = [self._sheets[index] for index in sorted(self._sheets)]
        fresh, kept = [s for s in sheets if not s.kept], [s for s in sheets if s.kept]
        failures = {sheet.name: sheet.error for sheet in fresh if sheet.error is not None}
        report = PredictReport(
            images=len(fresh),
            failed=len(failures),
            polygons=sum(sheet.polygons for sheet in fresh),
            seconds=self._seconds,
            images_per_s=len(fresh) / max(self._seconds, 1e-9),
            ceiling_share=self._ceiling_share(),
            batch_size=min((parcel.batch_size for parcel in self._parcels if parcel.pixels), default=self._batch_size),
            stages=self._stages(),
        )
        return FilesReport(
            report=None if self._stopped else report,
            failures=failures,
            written=len(fresh) - len(failures),
            kept=len(kept),
            kept_polygons=sum(sheet.polygons for sheet in kept),
            stopped=self._stopped,
        )

    def _ceiling_share(self) -> float | None:
        ceilings = {parcel.scorer: parcel.ceiling for parcel in self._parcels if parcel.ceiling is not None}
        pixels = sum(parcel.pixels for parcel in self._parcels)
        return ceiling_share(pixels / max(self._seconds, 1e-9), sum(ceilings.values())) if ceilings else None

    def _stages(self) -> dict[str, Any]:
        """Seconds of work in each step, of all workers together."""
        busy = {step: sum(p.busy_s.get(step, 0.0) for p in self._parcels) for step in ("read", "score", "write")}
        stages: dict[str, Any] = {step: {"busy_s": seconds} for step, seconds in busy.items()}
        return stages | {"workers": self._workers}


def _absolute(image: ImageFile) -> ImageFile:
    return Path(os.path.abspath(image)) if isinstance(image, Path) else image  # noqa: PTH100  links stay links


def _save(sizes: str, file: Path | str) -> None:
    with tempfile.TemporaryDirectory(prefix="brim-") as folder:
        tuned = Path(folder, "sizes.json")
        tuned.write_text(sizes)
        BatchSizes.read(tuned).write(file)


# What the cluster can do


def _resources(cluster: RayCluster, recipe: Recipe) -> Resources:
    if recipe.device == "auto" and cluster.gpus:
        return Resources(num_scorers=cluster.gpus, score={"num_gpus": 1, "num_cpus": 0}, beside={"num_cpus": 1})
    half = {"num_cpus": 1 - 2 * SHARE, "num_gpus": 0}  # of a core: what is beside it needs the rest
    return Resources(num_scorers=max(1, cluster.cpus), score=half, beside={"num_cpus": SHARE})


def check_nodes(nodes: Iterable[Node]) -> None:
    """Refuse nodes whose memory is used up: what starts there would be killed again and again."""
    for node in nodes:
        if node.free_bytes < NODE_BYTES:
            raise ClusterError(
                f"node {node.host} has {format_size(node.free_bytes)} of memory free, bulk prediction needs "
                f"{format_size(NODE_BYTES)}; end what else runs there, or take the node away"
            )


def check_alike(nodes: Iterable[dict[str, Any]]) -> None:
    """Refuse GPUs of several types, as Ray names them: the last bits of results may differ."""
    kinds: dict[str, str] = {}
    for node in nodes:
        for name in node["Resources"] if node["Alive"] and node["Resources"].get("GPU") else ():
            if name.startswith("accelerator_type:"):
                kinds.setdefault(name.partition(":")[2], str(node["NodeManagerAddress"]))
    if len(kinds) > 1:
        found = ", ".join(f"{kind} on {host}" for kind, host in kinds.items())
        raise ClusterError(
            f"the cluster mixes GPUs ({found}), whose last bits may differ",
            code="mixed_devices",
            hint="accept the difference with {allow_mixed}",
        )


def _check_seen(cluster: RayCluster, images: Iterable[ImageFile]) -> None:
    """Refuse files of this machine that another node does not see: it could only list them all as failed."""
    paths = [image for image in images if isinstance(image, Path)]
    if not paths:
        return
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    wanted = {str(_absolute(path)): path.stat().st_size for path in {paths[0], paths[-1]} if path.is_file()}
    ask = ray.remote(num_cpus=0, max_retries=0)(_unseen)
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(wanted)
        for node in cluster.nodes
    ]
    for node, unseen in zip(cluster.nodes, ray.get(asked, timeout=SEE_S), strict=True):
        if unseen is not None:
            raise ClusterError(
                f"node {node.host} does not see {unseen}; put the images where every node has them under one path, "
                "or into an object store"
            )


def _unseen(wanted: dict[str, int]) -> str | None:
    for name, size in wanted.items():
        if not Path(name).is_file() or Path(name).stat().st_size != size:
            return name
    return None


def _tuned(
    ray: Any, resources: dict[str, float], recipe: Recipe, weights: bytes, sizes: str | None
) -> tuple[int, str | None]:
    """The batch size of a worker's device and the sizes it knows now: tuned once, not by every worker."""
    tune = ray.remote(**resources)(_tune)
    found = ray.get(tune.remote(recipe, weights, sizes))
    raise_if_told(found)
    return found  # type: ignore[no-any-return]


def _tune(recipe: Recipe, weights: bytes, sizes: str | None) -> "tuple[int, str | None] | Told":
    try:
        scorer = BulkScorer(recipe, weights, sizes)
    except BrimError as failure:
        return Told(type(failure).__name__, str(failure))
    return scorer.batch_size, scorer.batch_sizes

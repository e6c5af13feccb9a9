"""The order of a run: warm start, evaluation, GRPO, evaluation, results."""

from nanorchestra.model.lora import save_adapter
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.report.page import write_report
from nanorchestra.report.run import held_out_scores, table
from nanorchestra.report.watch import peak_memory_mb
from nanorchestra.schemas import Json
from nanorchestra.training.grpo import grpo
from nanorchestra.training.run import TrainingRun
from nanorchestra.training.sampling import DividedRollout
from nanorchestra.training.warm_start import warm_start


def train(run: TrainingRun) -> bool:
    """Trains from where the run is to its end; returns False if it is asked to stop on the way."""
    if run.progress.phase == "warm_start":
        if not warm_start(run):
            return False
        run.progress.before = evaluate(run, "before")
        run.prepare("grpo")  # its reference are the weights of now (with LoRA: the base)
        run.publish()
        run.progress.phase, run.progress.step = "grpo", 0
        run.save()
        if any(run.ranks.gather(run.stop.asked)):
            return False
    if not grpo(run):
        return False
    results = _finish(run)
    run.checkpoints.wait()
    if run.ranks.first:
        done = {"seconds": run.elapsed, "steps": run.progress.step, "seed": run.config.run.seed}
        run.folder.write_json("summary.json", done | results)
        run.watch.close()
        write_report(run.folder.path)
    return True


def evaluate(run: TrainingRun, name: str) -> Json:
    """Returns the held-out summary of the present weights; records the attempts as phase `name`."""
    worlds = run.worlds
    tasks = worlds.held_out(run.config.evaluation.tasks)
    run.publish()
    rollout = run.rollout(run.config.evaluation.temperature)
    share = -(-len(tasks) // run.ranks.world)
    with run.bar(share, f"held-out tasks, {name}", unit="task") as bar:
        rollout.on_done = lambda _: bar.update()
        divided = DividedRollout(rollout, run.ranks, run.bill)
        trajectories = worlds.evaluate(divided, tasks)
    for task, trajectory in zip(tasks, trajectories, strict=True):
        run.record_trajectory(name, task, trajectory)
    return worlds.summarise(tasks, trajectories)


def parameters(model: Qwen3) -> int:
    """Returns how many numbers the model has, those in 4 bits and of adapters included."""
    in_4_bits = linears(model, QuantisedLinear)
    plain = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(module.in_features * module.out_features for _, module in in_4_bits)


def _finish(run) -> Json:
    """Evaluates and writes the model; returns the results, which rank 0 prints."""
    path, trainer, worlds = run.folder.path, run.trainer, run.worlds
    after = evaluate(run, "after")
    bill = run.bill.total(run.ranks)
    # The other ranks send their shards to rank 0.
    first, dtype = run.ranks.first, run.dtype
    save_checkpoint(trainer.model, run.tokenizer, path / "model", dtype=dtype, write=first)
    if run.config.lora.rank:
        save_adapter(trainer.model, path / "adapter", run.config.model.path, write=first)
    if not first:
        return {}
    tasks = worlds.held_out(run.config.evaluation.tasks)
    results = {
        "bill_usd": bill,
        "peak_memory_mb": peak_memory_mb(),
        "parameters": parameters(trainer.model),
        "held_out": {
            "tasks": len(tasks),
            "before": run.progress.before,
            "after": after,
            "routers": worlds.routers(tasks),
        },
    }
    print(table(held_out_scores(results)))
    return results

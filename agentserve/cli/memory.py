"""`agentserve memory`: how a running server divides its device's memory between experts and KV; change it while it serves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from agentserve.cli import options, shapes


def memory(
    slots: Annotated[int | None, typer.Option(min=1, help="Experts that are to have a slot on the device.")] = None,
    percent: Annotated[float | None, typer.Option(min=0, max=100, help="The same, in percent of all experts.")] = None,
    model: Annotated[str | None, typer.Option(help="Which model. Default: the first.")] = None,
    url: Annotated[str | None, typer.Option(help="Address of the server. Default: as the settings say.")] = None,
    token: Annotated[str | None, typer.Option(help="Its own token. Default: from the state directory.")] = None,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
) -> None:
    """Show how the device's memory is divided between experts and KV, or have more or fewer experts on it, at once.

    KV takes what they leave and gives what they need. Running turns go on with the same tokens, and saved states stay; it holds
    until the worker ends (`model.engine.slots` in the settings is for good).
    """
    from agentserve.cli.chat import find_target
    from agentserve.cli.connect import Unreachable

    if slots is not None and percent is not None:
        options.fail("give --slots or --percent, not both", status=2)
    target = find_target(config, state_dir, url, token)
    try:
        answer = target.get("/v1/memory")
        if percent is not None:
            slots = slots_of(answer["workers"], model, percent)
        if slots is not None:
            answer = target.post("/v1/memory/experts", {"slots": slots} | ({} if model is None else {"model": model}))
    except Unreachable as error:
        options.fail(error.advice)
    for worker in answer["workers"]:
        for line in lines(worker):
            typer.echo(line)


def slots_of(workers: list[dict[str, Any]], model: str | None, percent: float) -> int:
    """Percent of a model's experts, in slots. Ends the command if nothing is known of them."""
    for worker in workers:
        if worker["memory"] is not None and model in (None, worker["model"]):
            return max(1, round(worker["memory"]["experts"] * percent / 100))
    options.fail("no worker of this model has experts on a device")


def lines(worker: dict[str, Any]) -> list[str]:
    """One worker, for people."""
    name, now = f"{worker['model']}/{worker['worker']}", worker["memory"]
    if now is None:
        said = "nothing to divide, its experts and KV are not on a device" if worker["answered"] else "does not answer"
        return [f"{name}: {said}"]
    share = f" ({100 * now['slots'] // now['experts']}% of {now['experts']})" if now["experts"] else ""
    found = [
        f"{name}: experts in {shapes.many(now['slots'], 'slot')}{share}, {shapes.size(now['slots'] * now['slot_bytes'])}; "
        f"{now['least_slots']} to {now['most_slots']} can be asked for",
        f"  KV for {now['pages'] * now['page_tokens']} tokens, {shapes.size(now['pages'] * now['page_bytes'])}",
    ]
    if (now["wanted_slots"], now["wanted_pages"]) != (now["slots"], now["pages"]):
        slots, tokens = shapes.many(now["wanted_slots"], "slot"), now["wanted_pages"] * now["page_tokens"]
        found.append(f"  on the way to {slots}, KV for {tokens} tokens")
    if now["lent_bytes"]:
        found.append(f"  {shapes.size(now['lent_bytes'])} are left to other programs")
    if now["fixed"]:
        found.append(f"  slots keep their memory when they are fewer: {now['fixed']}")
    if now["trouble"]:
        found.append(f"  the last change was given up: {now['trouble']}")
    return found

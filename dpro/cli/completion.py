"""`dpro completion`: shell completion of commands, options, paths and edits.

Takes the name of a shell, or the beginning of a word; returns a script, or completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from dpro.plugins import Command

VARIABLE = "_DPRO_COMPLETE"  # click's variable for a program named dpro
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that completes dpro's commands, options, paths and edits.

    \b
    eval "$(dpro completion bash)"                       in ~/.bashrc (bash 4.4)
    eval "$(dpro completion zsh)"                        in ~/.zshrc
    dpro completion fish > ~/.config/fish/completions/dpro.fish
    """
    from click.shell_completion import get_completion_class

    from dpro.cli import cli

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(cli, {}, "dpro", VARIABLE).source())


def edits(_context: click.Context, _option: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete an edit: first its name, then keys not given yet, then the words that a key takes."""
    from dpro.replay.whatif.grammar import keys_of
    from dpro.replay.whatif.registry import EDITS, all_kinds, kind_named

    name, colon, given = typed.partition(":")
    if not colon:
        named = [(f"{kind.name}:" if keys_of(kind) else kind.name, kind.summary) for kind in all_kinds()]
        return matching(named, typed)
    if name not in EDITS:
        return []
    keys = keys_of(kind_named(name))
    *before, last = given.split(",")
    done = typed.removesuffix(last)
    key, equals, _ = last.partition("=")
    if equals:
        choices = keys[key].choices if key in keys else ()
        return matching([(f"{done}{key}={word}", "") for word in choices], typed)
    left = keys.keys() - {part.partition("=")[0] for part in before}
    return matching([(f"{done}{name}=", key.help) for name, key in keys.items() if name in left], typed)


def ranges(_context: click.Context, option: click.Parameter, typed: str) -> list[CompletionItem]:
    """Complete `--steps` and `--ranks` with examples."""
    of = option.name
    examples = [
        ("3", f"one of the {of}"),
        ("3-8", f"{of} from 3 to 8, both included"),
        ("3,5,7-9", f"several {of}"),
    ]
    return matching(examples, typed)


def matching(words: list[tuple[str, str]], typed: str) -> list[CompletionItem]:
    """Return the words that begin with the typed text, as completions with their descriptions."""
    return [CompletionItem(text, help=meaning or None) for text, meaning in words if text.startswith(typed)]


def commands(listed: Mapping[str, Command], typed: str) -> list[CompletionItem]:
    """Complete names of commands, without importing the commands."""
    return matching([(name, command.help) for name, command in listed.items()], typed)

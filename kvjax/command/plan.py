"""``--plan``: what a run would allocate, from the model's shape alone."""

from kvjax.command.decode_options import DecodeConfig
from kvjax.command.fit import allowed_memory, settled_recipe
from kvjax.command.inputs import read_answer, read_input
from kvjax.command.outline import limits, outline
from kvjax.command.output import print_out
from kvjax.command.recipe import flags_in_errors, given_recipe
from kvjax.errors import CapacityError
from kvjax.memory import device_memory
from kvjax.report.say import say
from kvjax.report.units import table


def show_plan(config: DecodeConfig) -> int:
    """Print the plan; returns the exit code.

    Raises:
        CapacityError: it does not fit; the plan is printed all the same.
    """
    given_recipe(config)
    allowed = allowed_memory(config)
    has_prompt = (
        config.prompts or config.prompt_file or config.load_cache or config.prompt is not None
    )
    rows = read_input(config) if has_prompt else []
    outlined = outline(config, rows, read_answer(config))
    recipe = settled_recipe(config, outlined)
    with flags_in_errors():
        memory = allowed or device_memory()
        planned, refused = outlined.plan(recipe, memory), None
        try:
            if has_prompt:  # and so lengths, with which rows can share what there is
                planned = outlined.plan_of_longest(recipe, memory)
            else:
                planned.check()
        except CapacityError as error:
            refused = error
    if not config.quiet:
        for line in limits(config, outlined.request["config"].context_length, outlined.lengths):
            say(f"kvjax: {line}")
    lines = planned.rows()
    if config.dp > 1:
        lines.insert(0, ("groups of devices", f"{config.dp}, each with all of this"))
    print_out(table(lines) + "\n")
    if refused is not None:
        raise refused
    return 0

"""Mutants of what lies around the passes: the runner, export and its module, archives, listings, figures, the plan."""

from __future__ import annotations

from tests.mutations.mutant import Mutant

__all__ = ["MUTANTS"]

_EXPORT = "tests/test_export.py"
_LOGS = "tests/test_logs.py"
_LISTING = "tests/show/test_listing.py"
_REPORT = "tests/show/test_report.py"
_PLAN = "tests/test_plan.py"


def _of(file: str, *rows: tuple[str, str, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(what, breaks, f"{file}.py", old, new, (test,)) for what, breaks, old, new, test in rows)


MUTANTS: tuple[Mutant, ...] = (
    *_of(
        "passes/pipeline",
        (
            "any pass is left out",
            "without a pass that is needed nothing runs",
            "if step.name in options.leave_out and not step.optional]",
            "if False]",
            f"{_LOGS}::test_only_what_is_not_needed_can_be_left_out",
        ),
        (
            "it stops before the pass",
            "the pass that stop_after names runs",
            "names.index(options.stop_after) + 1",
            "names.index(options.stop_after)",
            f"{_LOGS}::test_stop_after_a_pass",
        ),
    ),
    *_of(
        "cp_compile/capture",
        (
            "arguments are state",
            "an exported graph has its sequence among the arguments",
            "cp_argument=i < len(names), cp_state=i >= len(names)",
            "cp_argument=False, cp_state=True",
            f"{_EXPORT}::test_it_is_the_program_of_the_backend",
        ),
    ),
    *_of(
        "cp_compile/export",
        (
            "arguments are shared",
            "a tensor that is given twice is two inputs",
            "if id(value) in seen:",
            "if False:",
            f"{_EXPORT}::test_a_tensor_that_is_given_twice_is_two_inputs",
        ),
    ),
    *_of(
        "cp_compile/rank_module",
        (
            "any number of ranks",
            "a program runs on as many ranks as it was exported for",
            "if group.size != cp_size:",
            "if False:",
            f"{_EXPORT}::test_another_number_of_ranks",
        ),
        (
            "any size",
            "a size is that of the export",
            "        return size == expected\n",
            "        return True\n",
            f"{_EXPORT}::test_calls_that_do_not_fit",
        ),
        (
            "any length",
            "a symbolic length is within its range",
            "return low <= symbols[free[0]] <= high",
            "return True",
            f"{_EXPORT}::test_calls_that_do_not_fit",
        ),
        (
            "any flag",
            "a flag is that of the export",
            "if isinstance(value, torch.Tensor) or value != expected:",
            "if False:",
            f"{_EXPORT}::test_calls_that_do_not_fit",
        ),
        (
            "one compiled form",
            "each length has a program of its own, where the compiler specialises",
            'sizes = () if compiler == "eager" else',
            "sizes = () if True else",
            f"{_EXPORT}::test_on_two_ranks[False-aot_eager-True]",
        ),
        (
            "gradients are those of the first call",
            "what requires grad, and the grad mode, decide the compiled form",
            "return torch.is_grad_enabled(), kinds, sizes",
            "return (sizes,)",
            f"{_EXPORT}::test_what_requires_grad_may_change",
        ),
        (
            "any mode",
            "a program stays in the mode of its export",
            "if mode != self._cp_signature.training:",
            "if False:",
            f"{_EXPORT}::test_the_mode_is_that_of_the_export",
        ),
    ),
    *_of(
        "cp_compile/archive",
        (
            "custom functions are saved",
            "a backward that an archive loses is refused",
            "if node.target is CUSTOM_FUNCTION:",
            "if False:",
            f"{_EXPORT}::test_what_cannot_be_saved",
        ),
        (
            "ranges are forgotten",
            "a loaded program holds for the lengths of the export",
            '"ranges": signature.ranges,',
            '"ranges": {},',
            f"{_EXPORT}::test_the_manifest",
        ),
    ),
    *_of(
        "cp_compile/show/listing",
        (
            "all is sent",
            "a rank keeps its own part of an all-to-all",
            "total = size * times * (cp_size - 1)",
            "total = size * times * cp_size",
            f"{_LISTING}::test_layouts_and_moves",
        ),
        (
            "local shapes",
            "a line has the shape of the whole",
            "shape=local if layout is None else global_shape(local, layout),",
            "shape=local,",
            f"{_LISTING}::test_names_are_those_of_the_model",
        ),
        (
            "names by number",
            "an op has its module's name",
            "name = path if path and alone[path] == 1 else f\"{path}_{wrote(node).strip('_')}\"",
            "name = node.name",
            f"{_LISTING}::test_one_layer_more_renames_nothing",
        ),
    ),
    *_of(
        "cp_compile/show/layers",
        (
            "layers of a length are equal",
            "only layers with the same lines are one",
            "and first.forms() == second.forms()",
            "and True",
            f"{_LISTING}::test_constants_are_equal_by_their_values",
        ),
        (
            "values from elsewhere are alike",
            "layers that read other values are not one",
            "return [hidden.get(word, word) for word in words[0]] == list(words[1])",
            "return True",
            f"{_LISTING}::test_layers_that_read_other_values",
        ),
    ),
    *_of(
        "cp_compile/show/memory",
        (
            "all is freed late",
            "a value is freed behind its last use",
            "change[storage.end + 1] -= amount",
            "change[-1] -= amount",
            f"{_REPORT}::test_the_peak_is_what_a_step_holds[aot_eager]",
        ),
        (
            "what is computed again is the same",
            "what the backward computes again has memory of its own",
            "        self.half += 1\n",
            "",
            f"{_REPORT}::test_the_peak_is_what_a_step_holds[aot_eager]",
        ),
        (
            "nothing is fused",
            "what inductor fuses is not stored",
            "if self.fused and not _is_stored(node):",
            "if False:",
            f"{_REPORT}::test_the_peak_is_what_a_step_holds[a large vocabulary]",
        ),
    ),
    *_of(
        "cp_compile/show/report",
        (
            "all kv heads",
            "the least counts the kv heads that a rank's query heads use",
            "return sum(len({q // group for q in range(r * share, (r + 1) * share)}) for r in range(cp_size))",
            "return cp_size * kv_heads",
            f"{_REPORT}::test_exchanges_and_bytes_beside_the_least",
        ),
    ),
    *_of(
        "cp_compile/plan/work",
        (
            "all pairs are attended to",
            "causal attention is half the work",
            "return int(count) // (2 if causal else 1)",
            "return int(count)",
            f"{_PLAN}::test_work_is_counted_by_op",
        ),
    ),
    *_of(
        "cp_compile/plan/state",
        (
            "fsdp holds shards alone",
            "FSDP2 on the root holds whole parameters while a step runs",
            "return State(whole + shards + self.buffers,",
            "return State(shards + self.buffers,",
            f"{_PLAN}::test_state_by_sharding",
        ),
    ),
)

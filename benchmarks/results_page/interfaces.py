"""Sections of the results that tests of the HTTP APIs write: conformance with the OpenAPI document, and evaluations."""

from benchmarks.page_section import SERVICES, Document, Headline, PageSection, Section, Target, grid


def openapi(document: Document) -> Section:
    failures, total, wanted = document["failures"], document["num_cases"], document["asked_for"]
    rows = [
        (f"`{label}`", f"{found['cases']:,}", ", ".join(f"{status}: {n:,}" for status, n in found["answers"].items()))
        for label, found in document["operations"].items()
    ]
    phases = ", ".join(f"{name}: {times:,}" for name, times in document["phases"].items())
    return Section(
        done=(
            f"Schemathesis reads `/openapi.json` of real services with the demonstration's model, and makes valid and "
            f"invalid requests of it with seed {document['seed']}; valid ones are fitted to the model, and outputs are "
            "kept to four tokens. Checked are: no 5xx, status, content type, headers and body as described, each event "
            "of a stream too, other methods refused with `Allow`, and nothing found after its deletion."
        ),
        headlines=[
            Headline(
                f"{total:,} requests, {document['num_streams']:,} answered by streams: {len(failures) or 'no'} faults",
                [Target("none", not failures), Target(f"at least {wanted:,} requests", total >= wanted)],
            )
        ],
        blocks=[
            f"Requests by phase: {phases}. It took {document['seconds']:g} s.",
            grid(("operation", "requests", "answers by status"), rows),
        ],
        versions=("schemathesis",),
    )


def evaluation(document: Document) -> Section:
    tasks = document["tasks"]
    rows = [
        (each["task"], each["api"], name, f"{value:.8g}", f"{each['in_process'][name]:.8g}")
        for each in tasks
        for name, value in each["served"].items()
    ]
    texts = [each for each in tasks if each["num_equal_texts"] is not None]
    num_texts, num_equal = (sum(each[key] for each in texts) for key in ("num_items", "num_equal_texts"))
    far = max(each["greatest_difference"] or 0.0 for each in tasks)
    return Section(
        done=(
            "EleutherAI's harness evaluates the demonstration's model through the gateway, and with `hf` in its own "
            f"process, both in float32, on tasks drawn from the grammar of the model's training text with seed "
            f"{document['seed']}, {tasks[0]['num_items']} items each. Accuracies and generated texts must be equal; "
            f"perplexities to {document['relative_tolerance']:g}, since sums of float32 depend on their order."
        ),
        headlines=[
            Headline(
                f"{sum(each['is_equal'] for each in tasks)} of {len(tasks)} tasks with equal scores, "
                f"{num_equal} of {num_texts} generated texts equal",
                [Target("all", all(each["is_equal"] for each in tasks) and num_equal == num_texts)],
            ),
            Headline(
                f"log-likelihoods of an item differ by {far:.2g} at most",
                [Target(f"≤ {document['logprob_tolerance']:g}", far <= document["logprob_tolerance"])],
            ),
        ],
        blocks=[grid(("task", "API", "score", "gateway", "`hf`"), rows)],
        versions=("lm-eval", "torch", "transformers"),
    )


OPENAPI = PageSection(
    kinds=("openapi",),
    title="OpenAPI",
    question="Is every answer of the HTTP APIs as the OpenAPI document says, whatever is sent?",
    command="python -m tests.openapi --record",
    measures=(*SERVICES, "gateway_svc", "tests/openapi"),
    target="no fault in 10,000 requests",
    render=openapi,
)

EVALUATION = PageSection(
    kinds=("evaluation",),
    title="Evaluations",
    question="Does an evaluation through the gateway give the scores of the model itself?",
    command="python -m tests.evaluation --record",
    measures=(*SERVICES, "gateway_svc", "tests/evaluation"),
    target="equal scores",
    render=evaluation,
)

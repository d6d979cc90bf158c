"""Section of the result of a compliance suite that others wrote. Knows no template of it."""

from benchmarks.page_section import Document, Headline, PageSection, ResultRow, Section, Target, grid


def open_responses(document: Document) -> Section:
    templates: list[ResultRow] = document["templates"]
    passed = sum(each["outcome"] == "passed" for each in templates)
    offered = [each for each in templates if each["not_offered"] is None]
    are_met = all(each["outcome"] == "passed" for each in offered)
    rest = len(templates) - len(offered)
    return Section(
        done=(
            f"The suite of Open Responses, commit `{document['suite_commit'][:7]}`, run by bun {document['bun']} "
            "against real processes with a model that recites a text, or a call where tools are offered. Each "
            "template sends requests and checks the answers against the specification's schemas."
        ),
        headlines=[
            Headline(
                f"{passed} of {len(templates)} templates pass; {rest} are of what this server does not offer",
                [Target(f"the other {len(offered)}", are_met)],
            )
        ],
        blocks=[
            grid(
                ("template", "outcome", "not offered"),
                [(each["name"], each["outcome"], each["not_offered"]) for each in templates],
            )
        ],
        versions=("grpcio",),
    )


OPEN_RESPONSES = PageSection(
    kinds=("open_responses",),
    title="Open Responses",
    question="Does the Responses API pass the compliance suite of its specification?",
    command="python -m tests.open_responses FOLDER --record",
    measures=("quire", "gateway_svc", "tests/open_responses.py"),
    target="every template passes whose subject is offered",
    render=open_responses,
)

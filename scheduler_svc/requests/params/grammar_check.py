"""Check of grammars by the served model's vocabulary; knows which model that is, and leaves the trial to `text`."""

from common.violations import refusal_of
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.text.grammar_trial import GrammarRefusedError, GrammarTrial
from scheduler_svc.text.tokenizer import ModelTokenizer

_OF_LARK = "; it is read in Lark's syntax, whose rules are written `start: …`, not `root ::= …`"


class GrammarCheck:
    """One per process; keeps the trial of the model that is served now."""

    def __init__(self) -> None:
        self._tokenizer: ModelTokenizer | None = None
        self._trial: GrammarTrial | None = None

    async def check(self, grammar: str, model: ServedModel, tenant: str = "") -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled; empty: there is none.

        Tenants take turns. Raises FailedPreconditionError if none can, with the model's tokenizer.
        """
        if not grammar:
            return
        try:
            await self._trial_of(model).check(grammar, tenant)
        except GrammarRefusedError as error:
            hint = _OF_LARK if '"lark_grammar"' in grammar and "::=" in grammar else ""
            raise refusal_of("structured_output", f"cannot be used: {error}{hint}") from error

    def _trial_of(self, model: ServedModel) -> GrammarTrial:
        tokenizer, limits = model.tokenizer, model.limits
        assert tokenizer is not None, "structured outputs are refused without a tokenizer"
        if self._trial is None or self._tokenizer is not tokenizer:
            self._tokenizer = tokenizer
            self._trial = GrammarTrial(tokenizer.tokenizer_json, limits.vocab_size, sorted(limits.eos_token_ids))
        return self._trial

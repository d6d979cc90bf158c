"""The model that the deployment serves, asked for again after a few seconds."""

import time

import quire
from gateway_svc.api_error import ApiError
from gateway_svc.vocabulary import Vocabulary

FRESH_S = 5.0


class ServedModel:
    """Name and properties of the served model."""

    def __init__(self, client: quire.AsyncClient, vocabulary: Vocabulary) -> None:
        self._client = client
        self._vocabulary = vocabulary
        self._model: quire.Model | None = None
        self._asked_s = 0.0

    async def get(self) -> quire.Model:
        """The model. Raises UnavailableError while no worker has registered."""
        now_s = time.monotonic()
        if self._model is None or now_s - self._asked_s > FRESH_S:
            self._model = await self._client.model()
            self._asked_s = now_s
            self._vocabulary.use(self._model)
        return self._model

    async def check(self, name: str | None) -> str:
        """The model's name. Raises ApiError if a request names another one, QuireError as `get`."""
        model = await self.get()
        if name is not None and name != model.name:
            fault = f"The model '{name:.200}' does not exist" if name else "The name of the model is empty"
            message = f"{fault}; this server has '{model.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model.name

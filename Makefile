.PHONY: protos
VENV ?= .venv
PY := $(VENV)/bin/python
PROTOS := $(wildcard protos/*.proto)

protos:
	PATH=$(abspath $(VENV))/bin:$$PATH $(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. $(PROTOS)

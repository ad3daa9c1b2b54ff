# ckptd: `make run` sets everything up and runs the demonstration; `make test` checks everything.

# 3.11 first: the tests and every figure were made with it. Each is tried, since a shim of pyenv may lead nowhere.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for found in python3.11 python3.12 python3.13 python3 $$(ls -d ~/.pyenv/versions/3.1[123].*/bin/python 2>/dev/null); do \
  "$$found" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && { command -v "$$found"; break; }; done)
endif
VENV   ?= .venv
# Of `make install`.
PREFIX ?= /opt/ckptd
# Of the image of `make release`; empty: as the Dockerfile says.
BASE   ?=
PY     := $(VENV)/bin/python
JOBS   ?= 4
# Test workers; each takes file after file, since much of the tests waits for daemons and links.
WORKERS ?= 2
# `make pytest COVERAGE=` leaves it out: tracing each line takes as long as the tests of pure code do.
COVERAGE ?= --cov=ckptd --cov-branch --cov-report=term:skip-covered
ARGS   ?=
REMOTE ?= directory
# Of a long run; what is left is gone on with by the next one.
MINUTES ?= 30
# Of `make powercuts`.
FS      ?= ext4
CUTS    ?= 200

export OMP_NUM_THREADS ?= 1
export MAX_JOBS        ?= $(JOBS)
# A cache of compiled parts of its own: two environments that share one compile it anew in turns.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.build/torch_extensions
# DeepSpeed and its compiler calls look for ninja on PATH.
export PATH            := $(CURDIR)/$(VENV)/bin:$(PATH)

TORCH   := $(VENV)/.stamp-torch
INSTALL := $(VENV)/.stamp-install
JIT     := $(VENV)/.stamp-jit
ADAMS   := $(VENV)/.stamp-FusedAdamBuilder $(VENV)/.stamp-CPUAdamBuilder
PEERS   := .build/.stamp-peers
AUDIT   := .build/.stamp-audit
DOCS    := .build/.stamp-docs
TRAINERS := .build/.stamp-frameworks

RGW_PACKAGES    := radosgw ceph-mon ceph-osd ceph-mgr ceph-common
SLURM_PACKAGES  := munge slurmctld slurmd slurm-client
# What both clients of the S3 store must pass.
S3_TESTS        := $(addprefix tests/stores/,test_s3.py test_s3_options.py test_s3_checksums.py test_s3_etags.py test_rgw.py) $(addprefix tests/faults/,test_s3_daemon.py test_s3_words.py test_transfer_faults.py)
SYSTEM_PACKAGES := libaio-dev xfsprogs e2fsprogs util-linux openssh-server openssh-client systemd strace sshfs fuse3 prometheus chromium chromium-driver

VM_PACKAGES     := user-mode-linux debootstrap

# Python compiles what it imports: all of torch beforehand takes longer than its download. (An old pip, as a
# new venv has it, takes twice as long to find its way through constraints.txt.)
PIP := $(PY) -m pip install -q --no-compile -c constraints.txt
# Tests start some thousand processes; none of them is to compile again what the one before it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help check-python check-tools install setup run test pytest adams trainers demo-frameworks bench bench-weights bench-scale bench-idle bench-status bench-transfer bench-in-store bench-lastbyte bench-clients bench-all bench-paired bench-cluster bench-interference audit lint types loader-matrix engines releases ds-suite stores-full powercuts vm faults faults-full sim nightly fleet seeded slurm figures house pictures man dist release docs \
        system-packages rgw-packages vm-packages slurm-packages clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

PACKAGE_OF_PYTHON = "$(PYTHON)" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'

check-python:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	  echo "missing: Python 3.11, 3.12 or 3.13 (PYTHON is \"$(PYTHON)\"; python3 is $$(python3 --version 2>/dev/null || echo none)); install one, or name it: make PYTHON=/path/to/python3.11 …"; exit 1; \
	elif ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "missing: the venv module of $(PYTHON) (Debian, Ubuntu: apt install $$($(PACKAGE_OF_PYTHON))-venv)"; exit 1; \
	fi

check-tools:
	@fail=0; \
	$(MAKE) -s check-python || fail=1; \
	if [ $$fail = 0 ] && ! "$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'; then \
	  echo "missing: the headers of $(PYTHON) (Debian, Ubuntu: apt install $$($(PACKAGE_OF_PYTHON))-dev)"; fail=1; \
	fi; \
	for tool in gcc g++; do \
	  command -v $$tool >/dev/null || { echo "missing: $$tool, which DeepSpeed's JIT needs (Debian, Ubuntu: apt install build-essential)"; fail=1; }; \
	done; \
	exit $$fail

$(PY): | check-tools
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) --upgrade pip

# torch first: DeepSpeed's build looks at it.
$(TORCH): constraints.txt | $(PY)
	$(PIP) torch==2.13.0 setuptools wheel ninja numpy packaging py-cpuinfo psutil
	@touch $@

$(INSTALL): $(TORCH) pyproject.toml
	DS_BUILD_OPS=0 $(PIP) -e '.[demo,dev]'
	@touch $@

# One tiny run of two ranks compiles DeepSpeed's shared-memory collective, once per machine.
$(JIT): $(INSTALL)
	$(PY) -m examples.demo.warm_up
	@touch $@

install: check-python ## ckptd alone, without torch, into PREFIX (/opt/ckptd), with any Python from 3.11 to 3.13
	"$(PYTHON)" -m venv "$(PREFIX)"
	"$(PREFIX)/bin/python" -m pip install -q -c constraints.txt .
	@echo "$$("$(PREFIX)/bin/ckptd" --version) is installed: export PATH=$(PREFIX)/bin:\$$PATH"

setup: $(JIT) ## create .venv, install everything, compile DeepSpeed's JIT parts

run: setup ## the demonstration: real training, crashes, resume, judge (REMOTE=s3, ARGS="--stage 3 --keep DIR")
	$(PY) -m examples.demo --remote $(REMOTE) $(ARGS)

# More trainers, over the environment that has torch and DeepSpeed.
$(TRAINERS): examples/frameworks/requirements.txt constraints.txt | $(INSTALL)
	"$(PYTHON)" -m venv --clear .build/frameworks
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > .build/base.pth
	mv .build/base.pth .build/frameworks/lib/python3.*/site-packages/
	.build/frameworks/bin/python -m pip install -q --no-compile -c constraints.txt -r examples/frameworks/requirements.txt
	@touch $@

trainers: setup $(TRAINERS) ## each trainer without ZeRO: saved, committed, restored and resumed by itself; writes docs/trainers.md
	$(PY) -m tests.e2e.trainers $(ARGS)

demo-frameworks: setup $(TRAINERS) ## each trainer's launch file unchanged: first commit, kill -9, resume on other ranks (ARGS="trl --out DIR")
	$(PY) -m examples.frameworks --install $(ARGS)

# DeepSpeed's own Adams, which the tests train with: a compiler's minute each, so neither waits for the other.
$(ADAMS): $(VENV)/.stamp-%: | $(INSTALL)
	DS_ACCELERATOR=cpu $(PY) -c 'from deepspeed.accelerator import get_accelerator as found; found().create_op_builder("$*").load(verbose=False)'
	@touch $@

adams: $(ADAMS) ## compile DeepSpeed's Adams ahead of the tests

lint: $(INSTALL) ## format check and lint
	$(VENV)/bin/ruff format --check ckptd tests bench examples
	$(VENV)/bin/ruff check ckptd tests bench examples

types: $(INSTALL) ## mypy --strict
	$(VENV)/bin/mypy

test: setup lint types pytest ## everything: format, lint, types, tests with branch coverage

pytest: setup adams ## the tests alone
	rm -f .coverage .coverage.*
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COVERAGE) $(ARGS)

bench: setup ## (root) conversion against ds_to_universal and cp, on three disks, and bench-scale (writes docs/performance.md)
	$(PY) -m bench.convert $(ARGS)
	$(PY) -m bench.disks
	$(PY) -m bench.scale

bench-scale: setup ## (root) checkpoints of hundreds of ranks as sparse files: time, memory (writes docs/performance.md)
	$(PY) -m bench.scale $(ARGS)

bench-weights: setup ## weights against zero_to_fp32 and cp (writes docs/performance.md)
	$(PY) -m bench.weights $(ARGS)

bench-idle: setup ## memory and CPU of a daemon at rest (ARGS="--remote s3 --jobs 1"); takes a quarter of an hour
	$(PY) -m bench.idle $(ARGS)

bench-status: setup ## how long `ckptd status` takes and what it imports (writes docs/performance.md)
	$(PY) -m bench.status $(ARGS)

# The tools that transfers are compared with, away from ckptd's own environment.
$(PEERS): bench/peers.txt | $(PY)
	"$(PYTHON)" -m venv .build/peers
	.build/peers/bin/python -m pip install -q -r bench/peers.txt
	@touch $@

bench-transfer: setup $(PEERS) ## transfers against boto3, s3fs, awscrt, s5cmd, rclone, aws, cp (writes docs/performance.md)
	$(PY) -m bench.transfer $(ARGS)

bench-lastbyte: setup ## how long after its last byte a save is committed (ARGS="--saves 100 --trainer deepspeed")
	$(PY) -m bench.lastbyte $(ARGS)

bench-in-store: setup ## what of a form the store copies from shards that it holds (writes docs/performance.md)
	$(PY) -m bench.in_store $(ARGS)

bench-clients: setup ## the S3 store over botocore and over s3fs, in turns (writes docs/performance.md)
	$(PY) -m bench.clients $(ARGS)

bench-interference: setup ## step and save times of a real training with and without ckptd (writes docs/performance.md)
	$(PY) -m bench.interference $(ARGS)

bench-all: ## (root) every benchmark in turn, then all limits in one table and picture; takes hours (writes docs/performance.md)
	$(MAKE) bench bench-weights bench-transfer bench-in-store bench-clients bench-lastbyte bench-idle bench-status bench-interference bench-cluster
	$(PY) -m tests.fleet.cost --publish
	$(PY) -m bench.summary

bench-paired: setup ## this tree against another commit, in turns (BEFORE=COMMIT); none of it should be slower
	test -d .build/before-$(BEFORE) || git worktree add --detach .build/before-$(BEFORE) $(BEFORE)
	$(PY) -m bench.paired .build/before-$(BEFORE) $(ARGS)

bench-cluster: setup ## a conversion from bucket to bucket by 1, 2 and 4 workers (writes docs/performance.md)
	$(PY) -m bench.cluster $(ARGS)

$(AUDIT): bench/audit.txt | $(PY)
	"$(PYTHON)" -m venv .build/audit
	.build/audit/bin/python -m pip install -q -r bench/audit.txt
	@touch $@

audit: $(INSTALL) ## known vulnerabilities of everything installed (says so where the advisory service does not answer)
	@if $(MAKE) -s $(AUDIT); then \
	  $(PY) -m bench.audit .build/audit/bin/pip-audit "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	else \
	  echo "skipped: pip-audit could not be installed (no package index?)"; \
	fi

$(DOCS): bench/docs.txt | $(PY)
	"$(PYTHON)" -m venv .build/docs
	.build/docs/bin/python -m pip install -q -r bench/docs.txt
	@touch $@

docs: $(INSTALL) $(DOCS) ## the pages of docs/ as a site in .build/site (writes docs/configuration.md, docs/commands.md)
	$(PY) -m tests.support.configuration_page
	$(PY) -m tests.support.commands_page
	NO_MKDOCS_2_WARNING=1 .build/docs/bin/mkdocs build --strict --quiet

# Each bench-* draws its own picture as well.
pictures: $(INSTALL) ## the tables of docs/performance.md as docs/*.png, the terminal and the page (needs chromium)
	$(PY) -m bench.pictures
	$(PY) -m tests.support.pictures

loader-matrix: setup adams ## every stage x ranks x optimizer through DeepSpeed's own loader (writes docs/loader-matrix.md)
	CKPTD_FULL=1 $(PY) -m pytest --timeout 7200 tests/e2e/test_loader.py tests/e2e/test_convert_real.py tests/e2e/test_dcp.py $(ARGS)

# Each release without dependencies, before this environment's torch; the trainers of its time beside it.
releases: MINUTES = 120
releases: setup ## twelve DeepSpeed releases: saves, kills, conversion, their own loaders (writes docs/releases.md; goes on where it was cut)
	$(PY) -m tests.releases --minutes $(MINUTES) $(ARGS)

engines: setup ## real saves by DeepSpeed's other engines and options, with its aio op (writes docs/engines.md)
	DS_ACCELERATOR=cpu $(PY) -m tests.engines $(ARGS)

ds-suite: setup ## DeepSpeed's own universal checkpoint tests over ckptd (DEEPSPEED_SRC=<source tree> ARGS="-- -k 2to4")
	$(PY) -m tests.ds_suite.run $(DEEPSPEED_SRC) $(ARGS)

stores-full: setup ## the conformance suite on every store and file system that this machine offers
	CKPTD_FULL=1 $(PY) -m pytest --timeout 1800 tests/stores tests/faults/test_s3_daemon.py tests/faults/test_s3_words.py tests/e2e/test_sftp.py tests/e2e/test_quickstart.py tests/e2e/test_bench_transfer.py tests/cluster_convert/test_cluster.py $(ARGS)
	CKPTD_FULL=1 CKPTD_REMOTE_CLIENT=s3fs $(PY) -m pytest --timeout 1800 -m "not botocore" $(S3_TESTS) $(ARGS)

powercuts: MINUTES = 60
powercuts: setup ## (root) power cuts of ext4 or XFS under the real daemon (FS=xfs CUTS=200 MINUTES=60; goes on where it was cut)
	$(PY) -m tests.vm.powercuts --fs $(FS) --cuts $(CUTS) --minutes $(MINUTES) $(ARGS)

vm: MINUTES = 120
vm: setup ## (root) guests of User-Mode Linux: NFS hangs, ESTALE, quotas; systemd; EIO (ARGS="nfs.hang"; goes on where it was cut)
	$(PY) -m tests.vm --minutes $(MINUTES) $(ARGS)

faults: WORKERS = 6
faults: setup ## what CI runs of faults and attacks: kill -9, full disks, lost remotes, hostile files, other versions
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder tests/faults tests/attacks tests/killpoints tests/golden $(ARGS)

faults-full: setup ## every kill point and error, real kills, the long tests (MINUTES=30 for each; goes on where it was cut)
	$(PY) -m tests.killpoints --minutes $(MINUTES)
	$(PY) -m tests.killpoints.real --minutes $(MINUTES)
	CKPTD_FULL=1 $(PY) -m pytest -p tests.support.resumable --minutes $(MINUTES) --timeout 1800 tests/faults tests/attacks tests/killpoints tests/golden tests/model tests/sim tests/fleet tests/vm $(ARGS)

# Seeds that no default run takes; what was lived with this very code counts, so a run that was cut goes on.
sim: setup ## 100,000 simulated crashes and power cuts (MINUTES=30, ARGS="--workers 3"); then `make figures`
	$(PY) -m tests.sim --seeds 600000-900000 --crashes 100000 --minutes $(MINUTES) $(ARGS)

# Defects first: a night of runs that find nothing is worth what they are known to find.
nightly: MINUTES = 480
nightly: setup ## seeded defects, then 10,000,000 simulated crashes and 100,000 real SIGKILLs (MINUTES=480; goes on where it was cut)
	$(PY) -m tests.seeded --jobs 2
	CKPTD_FULL=1 $(PY) -m pytest --timeout 7200 tests/sim/test_lives.py tests/sim/test_decisions.py tests/killpoints/test_killpoints.py -k "a_guard_taken_out or sees_it or a_defect_that_is_put_in"
	status=0; \
	$(PY) -m tests.sim --seeds 10000000-10300000 --minutes $$(($(MINUTES) / 4)) $(ARGS) || status=1; \
	$(PY) -m tests.sim --often --seeds 20000000-20080000 --crashes 10000000 --minutes $$((5 * $(MINUTES) / 12)) $(ARGS) || status=1; \
	$(PY) -m tests.killpoints.real --number 100000 --minutes $$(($(MINUTES) / 3)) || status=1; \
	exit $$status

# A history of 64 nodes costs a core minutes: each part has MINUTES, and goes on where it was cut.
fleet: setup ## simulated nodes: 10,000 histories of <= 8, 100 of 64 x 50, one of 64 x 1,000 (MINUTES=30 for each, ARGS="--workers 3")
	$(PY) -m tests.fleet --seeds 100000-110000 --minutes $(MINUTES) $(ARGS)
	$(PY) -m tests.fleet --seeds 50000-50100 --nodes 64 --checkpoints 50 --minutes $(MINUTES) $(ARGS)
	$(PY) -m tests.fleet --seeds 70001-70002 --nodes 64 --checkpoints 1000 --minutes $(MINUTES) $(ARGS)

slurm: setup ## (root) examples/slurm with real training on a Slurm of its own, four nodes on this machine; twenty minutes
	CKPTD_FULL=1 $(PY) -m pytest tests/slurm $(ARGS)

figures: $(INSTALL) ## write what the long runs came to into docs/faults.md
	$(PY) -m tests.support.figures

release: man ## sdist, wheel, SBOM (CycloneDX), image and SHA256SUMS in dist/ (BASE=IMAGE for another base)
	$(PY) -m bench.release --base "$(BASE)"

man: $(INSTALL) ## the manual page of all commands, .build/man/ckptd.1
	$(PY) -m ckptd.cli.man .build/man/ckptd.1

dist: man ## the sdist and the wheel with their checksums in dist/
	rm -rf dist && $(VENV)/bin/hatchling build -d dist && cd dist && sha256sum * > SHA256SUMS

house: $(INSTALL) ## how the code is laid out, now and before the rooms (writes the picture of docs/internals/architecture.md)
	$(PY) -m tests.support.house

seeded: setup ## defects put into ckptd one at a time: a test must find each (writes docs/faults.md)
	$(PY) -m tests.seeded --jobs 2 $(ARGS)

system-packages: ## (root) what the tests of file systems, SFTP, hanging mounts, the systemd unit, alert rules and the page need
	@if command -v mkfs.xfs >/dev/null && command -v mkfs.ext4 >/dev/null && command -v losetup >/dev/null \
	    && { command -v sshd || test -x /usr/sbin/sshd; } >/dev/null && command -v ssh-keygen >/dev/null \
	    && command -v systemd-analyze >/dev/null && command -v strace >/dev/null && command -v sshfs >/dev/null && command -v promtool >/dev/null \
	    && command -v chromium >/dev/null && command -v chromedriver >/dev/null && test -f /usr/include/libaio.h; then \
	  echo "system packages: nothing to install"; \
	else \
	  export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SYSTEM_PACKAGES); \
	fi

rgw-packages: ## (root) Ceph's RADOS gateway, which stores-full then tries as well
	@if command -v radosgw >/dev/null && command -v ceph-mon >/dev/null && command -v ceph-osd >/dev/null; then \
	  echo "rgw packages: nothing to install"; \
	else \
	  export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(RGW_PACKAGES); \
	fi

vm-packages: ## (root) User-Mode Linux and debootstrap, which make vm needs
	@if command -v linux.uml >/dev/null && command -v debootstrap >/dev/null; then \
	  echo "vm packages: nothing to install"; \
	else \
	  export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(VM_PACKAGES); \
	fi

slurm-packages: ## (root) Slurm's daemons, which `make slurm` starts by itself
	@if command -v munged >/dev/null && command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null; then \
	  echo "slurm packages: nothing to install"; \
	else \
	  export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); \
	fi

clean: ## remove .venv, build products and caches
	rm -rf $(VENV) .build dist quickstart-out elastic-resume-out .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find ckptd tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

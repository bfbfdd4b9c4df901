#!/usr/bin/env bash
# Builds a Jaeger and an OpenTelemetry Collector into .jaeger/, for the tests marked `jaeger`; keeps what is there in
# the right version. They come from the Go module registry, through whatever proxy this machine's Go is set up for.
set -euo pipefail
cd "$(dirname "$0")/.."

JAEGER=v1.76.0       # Jaeger 2.13.0: the registry has no later one, for Jaeger's own tags are v2 and its path is not
JAEGER_SAYS=v2.13.0
COLLECTOR=v0.155.0   # the Collector inside Jaeger 2.20, which docker-compose.yml starts
COLLECTOR_V1=v1.61.0 # its stable modules
GO=1.25              # what both need

fail() {
  echo "deploy/build.sh: $1" >&2
  exit 1
}

check_go() {
  local wanted="Go $GO or later (https://go.dev/doc/install, or your distribution's golang)" have
  command -v go >/dev/null || fail "Jaeger and the Collector are built with Go, and there is none here: install $wanted"
  have=$(cd / && go env GOVERSION)
  # From 1.21 on, Go fetches the toolchain that a module asks for, unless it was told not to.
  if ! printf '%s\n' "go$GO" "$have" | sort -VC && [[ $(cd / && go env GOTOOLCHAIN) != auto* ]]; then
    fail "Jaeger and the Collector need Go $GO, and this is $have: install $wanted"
  fi
}

# The parts that deploy/otelcol.yaml, the tests and the benchmarks use, for the Collector's own builder.
collector_parts() {
  local core=go.opentelemetry.io/collector contrib=github.com/open-telemetry/opentelemetry-collector-contrib
  cat <<PARTS
dist: {name: otelcol, version: ${COLLECTOR#v}, output_path: source}
receivers:
  - gomod: $core/receiver/otlpreceiver $COLLECTOR
processors:
  - gomod: $core/processor/batchprocessor $COLLECTOR
  - gomod: $core/processor/memorylimiterprocessor $COLLECTOR
exporters:
  - gomod: $core/exporter/otlpexporter $COLLECTOR
  - gomod: $core/exporter/otlphttpexporter $COLLECTOR
  - gomod: $core/exporter/debugexporter $COLLECTOR
  - gomod: $core/exporter/nopexporter $COLLECTOR
  - gomod: $contrib/exporter/fileexporter $COLLECTOR
extensions:
  - gomod: $contrib/extension/healthcheckextension $COLLECTOR
  - gomod: $contrib/extension/storage/filestorage $COLLECTOR
providers:
  - gomod: $core/confmap/provider/envprovider $COLLECTOR_V1
  - gomod: $core/confmap/provider/fileprovider $COLLECTOR_V1
  - gomod: $core/confmap/provider/yamlprovider $COLLECTOR_V1
PARTS
}

# A replace directive in Jaeger's go.mod forbids `go install`, so it is built where the module cache has it.
build_jaeger() {
  local module=github.com/jaegertracing/jaeger source
  (cd "$work" && go mod download "$module@$JAEGER")
  source=$(cd "$work" && go list -m -f '{{.Dir}}' "$module@$JAEGER")
  (cd "$source" && go build -trimpath -o "$work/jaeger" \
    -ldflags "-s -w -X $module/internal/version.latestVersion=$JAEGER_SAYS" ./cmd/jaeger)
}

# The builder would call `go mod tidy`, which asks for what the tests of the parts import; `go build` does without.
build_collector() {
  collector_parts >"$work/parts.yaml"
  (
    cd "$work"
    go run "go.opentelemetry.io/collector/cmd/builder@$COLLECTOR" \
      --config parts.yaml --skip-get-modules --skip-compilation
    cd source
    go mod init otelcol
    go mod edit -require "go.opentelemetry.io/collector/otelcol@$COLLECTOR"
    sed -n 's/^ *- gomod: \(.*\) \(.*\)/-require=\1@\2/p' ../parts.yaml | xargs go mod edit
    go build -mod=mod -trimpath -ldflags "-s -w" -o ../otelcol .
  )
}

# Builds one of them, unless it is there and was built from the same description.
ensure() {
  local name=$1 description=$2
  if [[ -x .jaeger/$name && $(cat ".jaeger/$name.from" 2>/dev/null) == "$description" ]]; then
    echo ".jaeger/$name is there"
    return
  fi
  check_go
  echo "building .jaeger/$name (once; it takes minutes)"
  ("build_$3") >"$work/log" 2>&1
  rm "$work/log"
  mv "$work/$name" .jaeger/
  echo "$description" >".jaeger/$name.from"
}

leave() {
  if [[ -e $work/log ]]; then
    echo "deploy/build.sh: the build failed; its log ends so:" >&2
    tail -n 15 "$work/log" >&2
  fi
  rm -rf "$work"
}

mkdir -p .jaeger
work=$(mktemp -d)
trap leave EXIT
ensure jaeger "$JAEGER" jaeger
ensure otelcol "$(collector_parts)" collector

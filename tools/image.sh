#!/usr/bin/env bash
# The container images dorad:VERSION, dorad-proxy:VERSION and dorad-gateway:VERSION. Arguments go to
# the builds that compile:
#   tools/image.sh --build-arg BUILD_BASE=debian:12 --build-arg RUN_BASE=debian:12-slim
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

command -v docker >/dev/null || die "docker is needed to build images: install it, or see deploy/docker/Dockerfile"
version=$(<VERSION)
docker build -f deploy/docker/Dockerfile --target server -t "dorad:$version" "$@" .
docker build -f deploy/docker/Dockerfile --target gateway -t "dorad-gateway:$version" "$@" .
docker build -f deploy/docker/Dockerfile --target proxy -t "dorad-proxy:$version" .
echo "images: dorad:$version dorad-gateway:$version dorad-proxy:$version"

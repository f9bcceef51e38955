#!/usr/bin/env bash
# The container images dorad:VERSION and dorad-proxy:VERSION. Arguments go to the build of the first:
#   tools/image.sh --build-arg BUILD_BASE=debian:12 --build-arg RUN_BASE=debian:12-slim
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

command -v docker >/dev/null || die "docker is needed to build images: install it, or see deploy/docker/Dockerfile"
version=$(<VERSION)
docker build -f deploy/docker/Dockerfile --target server -t "dorad:$version" "$@" .
docker build -f deploy/docker/Dockerfile --target proxy -t "dorad-proxy:$version" .
echo "images: dorad:$version dorad-proxy:$version"

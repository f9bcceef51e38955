// The opaque page token of List: the start of the next page, and its filter. Pure functions and
// therefore thread-safe.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace dorad::rpc {

// The last item of a page. filter: the request's `name`.
struct PagePosition {
  std::string filter;
  std::string name;
  int64_t version = 0;
};

std::string MakePageToken(const PagePosition& last);

// INVALID_ARGUMENT (PAGE_TOKEN_INVALID) unless the token was made for this filter.
absl::StatusOr<PagePosition> ParsePageToken(const std::string& token, const std::string& filter);

}  // namespace dorad::rpc

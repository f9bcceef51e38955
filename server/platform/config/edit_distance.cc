#include "server/platform/config/edit_distance.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

namespace dorad {

// One row at a time.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row.back();
}

bool IsNear(size_t distance, std::string_view text) {
  return distance <= std::max<size_t>(2, text.size() / 3);
}

std::string DidYouMean(std::string_view text, absl::Span<const char* const> known) {
  if (text.size() > kLongestComparedName) return "";
  for (const char* name : known) {
    if (IsNear(EditDistance(text, name), name)) return absl::StrCat("; did you mean ", name, "?");
  }
  return "";
}

}  // namespace dorad

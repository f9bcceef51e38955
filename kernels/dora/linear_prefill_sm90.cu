#include "kernels/dora/linear_prefill_division.cuh"

namespace dorad::kernels {

cudaError_t LaunchPrefillSm90(const PrefillLaunch& launch) {
  const PrefillArgs args = PrefillArgsOf(launch);
  const PrefillDivision division = BestDivision(args, launch.processors / kPrefillCluster);
  switch (division.columns) {
    case 96:
      return LaunchDivision<96>(args, division, launch.stream);
    case 128:
      return LaunchDivision<128>(args, division, launch.stream);
    case 144:
      return LaunchDivision<144>(args, division, launch.stream);
    case 176:
      return LaunchDivision<176>(args, division, launch.stream);
    case 192:
      return LaunchDivision<192>(args, division, launch.stream);
    default:
      return LaunchDivision<256>(args, division, launch.stream);
  }
}

}  // namespace dorad::kernels

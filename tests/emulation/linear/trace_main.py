b=open('ROOT/tests/bench/kernels_linear_bench.cc').read()
i=b.index('int Main(int argc'); 
b=b[:i]+r'''
int Main(int argc, char** argv) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  Model model;
  static long long host[4096][132][20];
  const char* names[] = {"start","tables","prev","full0","pieces","middle","spin","reduced","W end","h ready","acc end","sent","end","W issued","all issued","piece acc","piece stored","bar1","bar2","row1"};
  for (int a = 1; a + 1 < argc; a += 2) {
    const int rows = std::atoi(argv[a]), adapters = std::atoi(argv[a + 1]);
    model.SetAdapters(rows, adapters);
    cudaGraph_t graph; cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int layer = 0; layer < kLayers; ++layer) for (int i = 0; i < 4; ++i) model.Launch(layer, i, rows, stream);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; ++i) { std::memset(host, 0, sizeof(host)); CHECK_CUDA(cudaMemcpyToSymbol(g_trace, host, sizeof(host))); CHECK_CUDA(cudaGraphLaunch(exec, stream)); CHECK_CUDA(cudaStreamSynchronize(stream)); }
    CHECK_CUDA(cudaMemcpyFromSymbol(host, g_trace, sizeof(host)));
    for (int p = 0; p < 4; ++p) {
      std::printf("rows %d adapters %d %s:", rows, adapters, kProjections[p].name);
      // relative to the end of the launch before; median over layers of min / median / max over blocks
      for (int e = 0; e < 20; ++e) {
        std::vector<double> lo, mid, hi;
        for (int layer = 2; layer < kLayers; ++layer) {
          const int module = layer * 7 + kProjections[p].first_module;
          const int before = p == 0 ? (layer - 1) * 7 + 6 : layer * 7 + kProjections[p - 1].first_module;
          long long end = 0;
          for (int b = 0; b < 132; ++b) end = std::max(end, host[before][b][12]);
          std::vector<double> v;
          for (int b = 0; b < 132; ++b) if (host[module][b][e] != 0) v.push_back((host[module][b][e] - end) * 1e-3);
          if (v.empty()) continue;
          std::sort(v.begin(), v.end());
          lo.push_back(v.front()); mid.push_back(v[v.size() / 2]); hi.push_back(v.back());
        }
        if (lo.empty()) continue;
        auto med = [](std::vector<double> v) { std::sort(v.begin(), v.end()); return v[v.size() / 2]; };
        std::printf(" |%s %.1f %.1f %.1f", names[e], med(lo), med(mid), med(hi));
      }
      std::printf("\n");
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec)); CHECK_CUDA(cudaGraphDestroy(graph));
  }
  return 0;
}

}  // namespace
}  // namespace dorad::kernels

int main(int argc, char** argv) { return dorad::kernels::Main(argc, argv); }
'''
inst='#include "kernels/dora/linear_instance.cuh"\n'
insts='namespace dorad::kernels {\n'+'\n'.join(f'template cudaError_t LaunchLinear<{n}>(const LinearLaunch& launch);' for n in (8,32,128))+'\n'+'\n'.join(f'template <> cudaError_t LaunchLinear<{n}>(const LinearLaunch&) {{ return cudaErrorNotSupported; }}' for n in (16,64,256))+'\n}\n'
open('OUT/lin/trace.cu','w').write(inst+insts+'#include <cuda_runtime.h>\n'+b)

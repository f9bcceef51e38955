s=open('ROOT/kernels/dora/linear_kernel.cuh').read()
def ins(anchor, text, after=True, n=1):
    global s
    assert s.count(anchor)>=1, anchor
    i=s.index(anchor)
    if after: i+=len(anchor)
    s=s[:i]+text+s[i:]
ins('namespace dorad::kernels {\n','''
__device__ long long g_trace[4096][132][20];
__device__ inline long long Now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
#define TR(i) do { g_trace[args_.p.first_module][blockIdx.x][i] = Now(); } while (0)
''')
i=s.index('  __device__ void Consume()')
s=s[:i]+s[i:].replace('    WaitForPrevious();\n','    WaitForPrevious();\n    if (threadIdx.x == 0) TR(2);\n',1)
ins('    ForEachTile<Config::kPanelRows>(args_.plan, [&](int panel, int split) {\n      float d[','    if (threadIdx.x == 0) TR(4);\n',after=False)
ins('      ForEachRankRun<','      if (threadIdx.x == 0) TR(8);\n',after=False)
ins('      if (args_.clusters || (args_.plan.Tiles()','      if (threadIdx.x == 0) TR(10);\n',after=False)
i=s.index('MeetInWorkspace(d, panel, split, warp)) {'); j=s.index('    });\n',i)
s=s[:j]+'      if (threadIdx.x == 0) TR(12);\n'+s[j:]
ins('''    if (lane_ == 0) SpinUntil(&args_.counters->shrunk, gridDim.x);
    __syncwarp();
''','    if (lane_ == 0 && reducer == 0) TR(6);\n')
ins('    SignalAll(&args_.counters->reduced, 2, Config::kReducerWarps, reducer);\n','    if (lane_ == 0 && reducer == 0) TR(7);\n')
ins('            if (!h_ready) WaitForH();\n','            if (lane_ == 0 && !h_ready) TR(9);\n')
ins('      StoreShrunk(d, segment','      if (threadIdx.x == 0) TR(15);\n',after=False)
i=s.index('      StoreShrunk(d, segment'); j=s.index('    });\n',i)
s=s[:j]+'      if (threadIdx.x == 0) TR(16);\n'+s[j:]
ins('      BarrierWait(weights_full_ + 8 * stage_, parity_);\n','      if (threadIdx.x == 0 && first_) { TR(3); first_ = false; }\n')
ins('  int in_flight_ = 0;','  bool first_ = true;\n',after=False)
i=s.index('  extern __shared__ uint8_t dynamic[];')
s=s[:i]+'  const LinearArgs& args_ = args;\n  if (threadIdx.x == 0) TR(0);\n'+s[i:]
ins('  LaunchDependents();\n','  if (threadIdx.x == 0) TR(1);\n')
ins('      ClusterBarrier();\n','      if (threadIdx.x == 0) TR(17);\n')
ins('      ClusterBarrier();\n      if (!by_batch && row_owner','      if (threadIdx.x == 0) TR(11);\n',after=False)
ins('      ClusterBarrier();\n      if (!by_batch && row_owner'[:24],'') if False else None
i=s.index('      if (!by_batch && row_owner'); s=s[:i]+'      if (threadIdx.x == 0) TR(18);\n'+s[i:]
i=s.index('      FinishRows(sum, 8 *'); j=s.index('\n',s.index(';',i)); s=s[:j]+'\n      if (threadIdx.x == 0 && i == 0) TR(19);\n'+s[j:]
open('OUT/lin/inc/kernels/dora/linear_kernel.cuh','w').write(s)

set -e
cd OUT/emu2
python3 - <<'P'
import re
import os
R='ROOT/'
K=os.environ.get('KDIR',R+'kernels/sampling/')
for f in ['numbers.cuh','row.cuh','select.cuh','sampling.cu','sampling.h']:
    s=open(K+f).read()
    s=s.replace('#include <cooperative_groups.h>','#include "emu.h"')
    s=re.sub(r'asm\("max.NaN.f32[^;]*;"[^;]*;','y = (a != a || b != b) ? NAN : (a > b ? a : b);',s)
    s=re.sub(r'asm volatile\(\s*"cp.async.bulk.*?\);\n','emu::Issue(to, row.x + id, kChunk * sizeof(float), landed);\n',s,flags=re.S)
    s=re.sub(r'asm volatile\([^;]*;\n','\n',s)
    s=re.sub(r'extern __shared__ .*?;\n','',s)
    s=s.replace('row_memory','emu::cur->cta->mem.data()')
    s=re.sub(r'  DORAD_CUDA_RETURN_IF_ERROR\(cudaFuncSetAttribute\(.*?\)\)\);\n','',s,flags=re.S)
    s=re.sub(r'kernel<<<clusters \* kCluster, threads, bytes, stream>>>\(p\);','emu::RunKernel(std::min(clusters, 3) * kCluster, threads, bytes, [&] { kernel(p); });',s)
    s=s.replace('return cudaGetLastError();','return cudaSuccess;')
    s=re.sub(r'#pragma unroll.*\n','',s)
    open('kernels/sampling/'+(f if f!='sampling.cu' else 'sampling.cc'),'w').write(s)
t=open(R+'tests/unit/kernels_sampling_test.cc').read()
t=t.replace('EXPECT_EQ(cudaGetLastError(), cudaSuccess);','')
i=t.index('TEST_F(SamplingKernelTest, OneGraph'); j=t.index('TEST_F(SamplingKernelTest, RefusesBad')
t=t[:i]+t[j:]
t=t.replace('Size{49152, 96, 4}','Size{49152, 8, 4}').replace('Size{151936, 64, 0}','Size{151936, 8, 0}').replace('Size{262144, 24, 0}','Size{20000, 16, 0}').replace('Size{151937, 16, 0}','Size{151937, 2, 0}').replace('Size{kMostVocabulary, 8, 0}','Size{21000, 8, 0}')
import re as _r
t=t.replace('constexpr int kDraws = 20000','constexpr int kDraws = 40')
open('tests/unit/test.cc','w').write(t)
P
CF="-std=c++20 -O2 -mfma -ffp-contract=off -w -IOUT/emu2 -IROOT -I/usr/local/cuda/include -fpermissive"
g++ $CF -include emu.h -c kernels/sampling/sampling.cc -o s.o
g++ $CF -c emu.cc -o e.o
[ "$1" = k ] || g++ $CF -c tests/unit/test.cc -o t.o
g++ t.o s.o e.o -o emutest -l:libgtest.a -l:libgtest_main.a -lpthread

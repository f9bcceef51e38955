# variant.sh NAME FLAGS...: builds .carry/lin/bench_NAME and, with TEST=1, test_NAME
set -e
name=$1; shift
cd ROOT; d=OUT/lin/$name; mkdir -p $d
F="-std=c++20 -O3 --expt-relaxed-constexpr -lineinfo -gencode=arch=compute_90a,code=sm_90a -IROOT"
export PATH=ROOT/.venv/bin:$PATH
{ echo "F=$F $*"; } > /dev/null
ls kernels/dora/linear*.cu | xargs -P 2 -I{} sh -c "nvcc $F $* -c {} -o $d/\$(basename {}).o 2> $d/\$(basename {}).log || cat $d/\$(basename {}).log"
grep -h -E 'C7|error' $d/*.log || true
g++ -std=c++20 -O2 -I. -I/usr/local/cuda/include -c tests/bench/kernels_linear_bench.cc -o $d/bench.o
nvcc -o .carry/lin/bench_$name $d/bench.o $d/*.cu.o
if [ -n "$TEST" ]; then g++ -std=c++20 -O2 -I. -I/usr/local/cuda/include -c tests/unit/kernels_linear_test.cc -o $d/test.o; nvcc -o .carry/lin/test_$name $d/test.o $d/*.cu.o -lgtest -lgtest_main; fi
strip .carry/lin/*_$name

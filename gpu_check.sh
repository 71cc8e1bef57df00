# All-reduce through the GPUs' memory (test, then e2e on 1 and 2 GPUs), engine on 2 ranks, decode context parallel, million on H100
export MINE=0d83633c92c7
export LOWBIT_ATTN_COMMIT=$MINE OUT=${OUT:-/tmp/out}; mkdir -p $OUT /tmp/tplog; LAST=${LAST:-352}
IFS=, read -r A B _ <<< "${CUDA_VISIBLE_DEVICES:-0,1}"; B=${B:-1}
for part in hopper ampere; do [ -e src/lowbit_attn/$part ] || ln -sfn $PWD/$part src/lowbit_attn/$part; done
GIVEN=$PYTHONPATH; export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/perf OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
CACHE=$(realpath -m "${LOWBIT_ATTN_CACHE_DIR:-/tmp/cache-tp}"); export LOWBIT_ATTN_CACHE_DIR=$CACHE; mkdir -p -m700 "$CACHE"; umask 022
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1
go() { # NAME END SECONDS COMMAND...: until END at the latest
  local name=$1 left=$(($2 - SECONDS)) most=$3; shift 3
  [ $left -lt 20 ] && { echo "$name: no time at $SECONDS"; return; }
  timeout -k 5 $((left < most ? left : most)) "$@" > /tmp/tplog/$name.log 2>&1
  local rc=$?; echo "$name: rc $rc at $SECONDS" | tee -a $OUT/times.log
  tail -c 2500 /tmp/tplog/$name.log > $OUT/$name.log
}
cat > /tmp/tp_prebuild.py <<'PY'
import sys, torch
import engine_bundle as b
from lowbit_attn import kernels
from lowbit_attn.build import build_all
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels.all_reduce import VARIANTS, all_reduce_key

def fp16(name):
    fmt, keys = FORMATS[name], []
    (path, rows), _ = kernels.pick("hopper", fmt, 128, torch.float16, 4)
    for other in (path, *kernels.other_ctas("hopper", path)):
        picked, _ = kernels.pick("hopper", fmt, 128, torch.float16, 4, other)
        keys += [kernels.decode_key("hopper", "sm_90a", "float16", 128, name, *picked)] if picked else []
    return keys + [kernels.quantize_key("sm_90a", "float16", 128, fmt, side) for side in "kv"] + [kernels.append_key("sm_90a", "float16", 128, fmt)]

if __name__ == "__main__":
    b.SHAPES = ((64, 3), (64, 12))
    sets = dict(sums=[all_reduce_key("sm_90a", dtype, width, v) for dtype, width in (("float16", 4096), ("bfloat16", 2880)) for v in VARIANTS],
                k4v4=fp16("k4v4"), engine=b.kernels_of(("k4v4",)), k2v2=fp16("k2v2"))
    for name in sys.argv[1:]:
        for key, error in build_all(sets[name], jobs=3):
            if error: print(key, error[-300:])
        print(name, len(sets[name]), flush=True)
PY
H100=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | grep -c H100)
go build1 120 110 python3 /tmp/tp_prebuild.py sums k4v4
CUDA_VISIBLE_DEVICES=$A,$B go sums 150 70 python3 -m pytest -q -x -n 0 -p no:cacheprovider tests/gpu/test_gpu_all_reduce.py
go build2 200 110 nice python3 /tmp/tp_prebuild.py engine $([ $H100 = 1 ] && echo k2v2) & BUILD=$!
CUDA_VISIBLE_DEVICES=$A,$B go tp 260 190 torchrun --nproc-per-node 2 perf/tensor_parallel.py --context 128K --batch 8 --batch 1 --output $OUT/tensor_parallel.jsonl
wait $BUILD
# the engine
for i in $(seq 1 60); do [ -e /opt/engine.ready ] && break; sleep 1; done
million() { [ $H100 = 1 ] && CUDA_VISIBLE_DEVICES=$B go million $LAST 110 python3 perf/million.py --no-checked --formats k4v4 --formats k2v2 --output $OUT/million.jsonl; }
million & MILLION=$!
engine() ( # NAME FLAGS...
  . /opt/engine/env.sh; export PYTHONPATH=$PWD/src:$PWD/perf:/opt/engine/site:$GIVEN LOWBIT_ATTN_CACHE_DIR=$CACHE LOWBIT_ATTN_COMMIT=$MINE
  local name=$1; shift
  CUDA_VISIBLE_DEVICES=$A,$B go $name $LAST 170 python3 perf/engine_ranks.py check --ranks 2 --output $OUT/engine.jsonl --limit $((LAST - SECONDS - 12)) "$@"
)
if [ -e /opt/engine.ready ]; then
  engine tokens & T=$!
  engine dealt --deal & D=$!
  wait $T $D
fi
wait $MILLION
echo "end at $SECONDS" | tee -a $OUT/times.log; cut -c1-600 $OUT/*.jsonl

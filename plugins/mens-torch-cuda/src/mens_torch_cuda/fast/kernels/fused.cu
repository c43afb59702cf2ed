// Fast mode's kernels between the products: bfloat16 in memory, float32 within. No rule of docs/numerics.md
// holds here. Rows are whole numbers of 16 bytes; strides are in elements.

typedef unsigned short half_t;  // the bits of a bfloat16
typedef unsigned int u32;
typedef long long i64;

struct alignas(16) Eight { u32 w[4]; };
struct alignas(8) Four { u32 w[2]; };

__device__ inline float low_of(u32 w) { return __uint_as_float(w << 16); }
__device__ inline float high_of(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ inline u32 both(float low, float high) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
}
__device__ inline void widen(const Eight& from, float* x) {
    for (int i = 0; i < 4; i++) { x[2 * i] = low_of(from.w[i]); x[2 * i + 1] = high_of(from.w[i]); }
}
__device__ inline void widen(const Four& from, float* x) {
    for (int i = 0; i < 2; i++) { x[2 * i] = low_of(from.w[i]); x[2 * i + 1] = high_of(from.w[i]); }
}
__device__ inline Eight narrow8(const float* x) {
    Eight out;
    for (int i = 0; i < 4; i++) out.w[i] = both(x[2 * i], x[2 * i + 1]);
    return out;
}
__device__ inline Four narrow4(const float* x) {
    Four out;
    for (int i = 0; i < 2; i++) out.w[i] = both(x[2 * i], x[2 * i + 1]);
    return out;
}

// The sum over the threads of a block, for every thread.
__device__ inline float block_sum(float x) {
    __shared__ float parts[32];
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
    for (u32 i = 0; i < blockDim.x / 32; i++) total += parts[i];
    return total;
}
__device__ inline float block_max(float x) {
    __shared__ float parts[32];
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float top = parts[0];
    for (u32 i = 1; i < blockDim.x / 32; i++) top = fmaxf(top, parts[i]);
    return top;
}

const int KEPT = 4;  // pieces of eight that a thread keeps of its row: up to 8,192 columns in all

// One block per row. sum = x + addend where there is an addend; y = norm(sum).
extern "C" __global__ void fast_norm(const half_t* x, const half_t* addend, const float* weight, half_t* sum,
                                     half_t* y, int width, float eps) {
    i64 row = (i64)blockIdx.x * width;
    float kept[KEPT][8], square = 0;
    for (int piece = 0; piece < KEPT; piece++) {
        int at = (piece * blockDim.x + threadIdx.x) * 8;
        if (at >= width) break;
        widen(*(const Eight*)(x + row + at), kept[piece]);
        if (addend) {
            float more[8];
            widen(*(const Eight*)(addend + row + at), more);
            for (int i = 0; i < 8; i++) kept[piece][i] += more[i];
            Eight rounded = narrow8(kept[piece]);
            *(Eight*)(sum + row + at) = rounded;
            widen(rounded, kept[piece]);
        }
        for (int i = 0; i < 8; i++) square += kept[piece][i] * kept[piece][i];
    }
    float scale = rsqrtf(block_sum(square) / width + eps);
    for (int piece = 0; piece < KEPT; piece++) {
        int at = (piece * blockDim.x + threadIdx.x) * 8;
        if (at >= width) break;
        for (int i = 0; i < 8; i++) kept[piece][i] *= scale * weight[at + i];
        *(Eight*)(y + row + at) = narrow8(kept[piece]);
    }
}

// One block per row. dx = residual + the gradient of norm; residual may be missing.
extern "C" __global__ void fast_norm_backward(const half_t* dy, const half_t* x, const float* weight,
                                              const half_t* residual, half_t* dx, int width, float eps) {
    i64 row = (i64)blockIdx.x * width;
    float kept[KEPT][8], by[KEPT][8], square = 0, along = 0;
    for (int piece = 0; piece < KEPT; piece++) {
        int at = (piece * blockDim.x + threadIdx.x) * 8;
        if (at >= width) break;
        widen(*(const Eight*)(x + row + at), kept[piece]);
        widen(*(const Eight*)(dy + row + at), by[piece]);
        for (int i = 0; i < 8; i++) {
            by[piece][i] *= weight[at + i];
            square += kept[piece][i] * kept[piece][i];
            along += by[piece][i] * kept[piece][i];
        }
    }
    float scale = rsqrtf(block_sum(square) / width + eps);
    float share = block_sum(along) / width * scale * scale;
    for (int piece = 0; piece < KEPT; piece++) {
        int at = (piece * blockDim.x + threadIdx.x) * 8;
        if (at >= width) break;
        float more[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (residual) widen(*(const Eight*)(residual + row + at), more);
        for (int i = 0; i < 8; i++) more[i] += scale * (by[piece][i] - kept[piece][i] * share);
        *(Eight*)(dx + row + at) = narrow8(more);
    }
}

// A head of width 8 * lanes by `lanes` neighbouring lanes: each has four numbers of either half.
__device__ inline float lanes_sum(float x, int lanes) {
    for (int step = lanes / 2; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// y [rows, heads, width] = the heads of x, normed and rotated by their row's angles.
extern "C" __global__ void fast_heads(const half_t* x, i64 x_row, const float* weight, const float* cosines,
                                      const float* sines, const i64* positions, half_t* y, int rows, int heads,
                                      int width, float eps) {
    int lanes = width / 8, lane = threadIdx.x % lanes, pairs = width / 2;
    i64 head = (i64)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    bool is_real = head < (i64)rows * heads;
    i64 row = is_real ? head / heads : 0;
    int number = is_real ? head % heads : 0;
    const half_t* from = x + row * x_row + number * width + lane * 4;
    float a[4], b[4], square = 0;
    widen(*(const Four*)from, a);
    widen(*(const Four*)(from + pairs), b);
    for (int i = 0; i < 4; i++) square += a[i] * a[i] + b[i] * b[i];
    float scale = rsqrtf(lanes_sum(square, lanes) / width + eps);
    if (!is_real) return;
    i64 angles = positions[row] * pairs + lane * 4;
    float first[4], second[4];
    for (int i = 0; i < 4; i++) {
        float p = a[i] * scale * weight[lane * 4 + i], q = b[i] * scale * weight[pairs + lane * 4 + i];
        float c = cosines[angles + i], s = sines[angles + i];
        first[i] = p * c - q * s;
        second[i] = q * c + p * s;
    }
    half_t* to = y + head * width + lane * 4;
    *(Four*)to = narrow4(first);
    *(Four*)(to + pairs) = narrow4(second);
}

// Its gradient, written where the heads lie in a row of dx.
extern "C" __global__ void fast_heads_backward(const half_t* dy, i64 dy_row, i64 dy_head, const half_t* x,
                                               i64 x_row, const float* weight, const float* cosines,
                                               const float* sines, const i64* positions, half_t* dx, i64 dx_row,
                                               int rows, int heads, int width, float eps) {
    int lanes = width / 8, lane = threadIdx.x % lanes, pairs = width / 2;
    i64 head = (i64)blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
    bool is_real = head < (i64)rows * heads;
    i64 row = is_real ? head / heads : 0;
    int number = is_real ? head % heads : 0;
    const half_t* from = x + row * x_row + number * width + lane * 4;
    const half_t* by = dy + row * dy_row + number * dy_head + lane * 4;
    float a[4], b[4], p[4], q[4], square = 0, along = 0;
    widen(*(const Four*)from, a);
    widen(*(const Four*)(from + pairs), b);
    widen(*(const Four*)by, p);
    widen(*(const Four*)(by + pairs), q);
    i64 angles = positions[row] * pairs + lane * 4;
    for (int i = 0; i < 4; i++) {
        float c = cosines[angles + i], s = sines[angles + i], first = p[i], second = q[i];
        p[i] = (first * c + second * s) * weight[lane * 4 + i];
        q[i] = (second * c - first * s) * weight[pairs + lane * 4 + i];
        square += a[i] * a[i] + b[i] * b[i];
        along += a[i] * p[i] + b[i] * q[i];
    }
    float scale = rsqrtf(lanes_sum(square, lanes) / width + eps);
    float share = lanes_sum(along, lanes) / width * scale * scale;
    if (!is_real) return;
    for (int i = 0; i < 4; i++) {
        p[i] = scale * (p[i] - a[i] * share);
        q[i] = scale * (q[i] - b[i] * share);
    }
    half_t* to = dx + row * dx_row + number * width + lane * 4;
    *(Four*)to = narrow4(p);
    *(Four*)(to + pairs) = narrow4(q);
}

__device__ inline float silu(float x) { return x / (1 + __expf(-x)); }
__device__ inline float gelu_inner(float x) { return 0.7978845608028654f * (x + 0.044715f * x * x * x); }
__device__ inline float tanh_of(float u) { return 1 - 2 / (1 + __expf(2 * u)); }

// y [rows, width] of gate and up, which are the halves of a row of gate_up.
extern "C" __global__ void fast_gate(const half_t* gate_up, half_t* y, i64 pieces, int width, int is_silu) {
    i64 piece = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= pieces) return;
    int across = width / 8;
    i64 row = piece / across, at = row * 2 * width + piece % across * 8;
    float gate[8], up[8];
    widen(*(const Eight*)(gate_up + at), gate);
    widen(*(const Eight*)(gate_up + at + width), up);
    for (int i = 0; i < 8; i++) {
        float bent = is_silu ? silu(gate[i]) : 0.5f * gate[i] * (1 + tanh_of(gelu_inner(gate[i])));
        up[i] *= bent;
    }
    *(Eight*)(y + piece * 8) = narrow8(up);
}

extern "C" __global__ void fast_gate_backward(const half_t* dy, const half_t* gate_up, half_t* dgate_up,
                                              i64 pieces, int width, int is_silu) {
    i64 piece = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= pieces) return;
    int across = width / 8;
    i64 row = piece / across, at = row * 2 * width + piece % across * 8;
    float by[8], gate[8], up[8];
    widen(*(const Eight*)(dy + piece * 8), by);
    widen(*(const Eight*)(gate_up + at), gate);
    widen(*(const Eight*)(gate_up + at + width), up);
    for (int i = 0; i < 8; i++) {
        float x = gate[i], bent, slope;
        if (is_silu) {
            float share = 1 / (1 + __expf(-x));
            bent = x * share;
            slope = share + bent * (1 - share);
        } else {
            float t = tanh_of(gelu_inner(x));
            bent = 0.5f * x * (1 + t);
            slope = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608028654f * (1 + 0.134145f * x * x);
        }
        gate[i] = by[i] * up[i] * slope;
        up[i] = by[i] * bent;
    }
    *(Eight*)(dgate_up + at) = narrow8(gate);
    *(Eight*)(dgate_up + at + width) = narrow8(up);
}

// One block per row of logits: its loss, and (softmax - one at the target) in bfloat16.
extern "C" __global__ void fast_loss(const float* logits, const i64* targets, float* losses, half_t* gradient,
                                     int width) {
    i64 row = (i64)blockIdx.x * width;
    const float4* from = (const float4*)(logits + row);
    float top = -3.402823466e38f, total = 0;
    for (int at = threadIdx.x; at < width / 4; at += blockDim.x) {
        float4 x = from[at];
        float higher = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
        if (higher > top) { total *= __expf(top - higher); top = higher; }
        total += __expf(x.x - top) + __expf(x.y - top) + __expf(x.z - top) + __expf(x.w - top);
    }
    float of_row = block_max(top);
    total = block_sum(total * __expf(top - of_row));
    int target = (int)targets[blockIdx.x];
    if (threadIdx.x == 0) losses[blockIdx.x] = of_row + __logf(total) - logits[row + target];
    if (!gradient) return;
    float by = 1 / total;
    for (int at = threadIdx.x; at < width / 4; at += blockDim.x) {
        float4 x = from[at];
        float p[4] = {__expf(x.x - of_row) * by, __expf(x.y - of_row) * by, __expf(x.z - of_row) * by,
                      __expf(x.w - of_row) * by};
        if (target / 4 == at) p[target % 4] -= 1;
        *(Four*)(gradient + row + at * 4) = narrow4(p);
    }
}

// k and v [rows, groups, width] into the cache's blocks [blocks, groups, 128, width], four numbers a thread.
extern "C" __global__ void fast_append(const half_t* k, i64 k_row, const half_t* v, i64 v_row, half_t* keys,
                                       half_t* values, const i64* blocks, const i64* offsets, i64 pieces,
                                       int groups, int width) {
    i64 piece = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (piece >= pieces) return;
    int across = groups * width / 4;
    i64 row = piece / across;
    int at = piece % across * 4, group = at / width;
    i64 to = ((blocks[row] * groups + group) * 128 + offsets[row]) * width + at % width;
    *(Four*)(keys + to) = *(const Four*)(k + row * k_row + at);
    *(Four*)(values + to) = *(const Four*)(v + row * v_row + at);
}

// One block per sequence, key head and part of its blocks: softmax so far of up to R query heads.
// room [sequences, heads, parts, width + 2]: highest score, sum, values.
template <int R>
__device__ void decode(const half_t* q, const half_t* keys, const half_t* values, const i64* tables,
                       const i64* positions, float* room, int groups, int each, int width, int across, int parts,
                       int window, float scale, float softcap) {
    __shared__ float query[R][256], share[R][128], of_warp[R][4], sum_of_warp[R][4], top[R], total[R];
    int part = blockIdx.x % parts, group = blockIdx.x / parts % groups, sequence = blockIdx.x / parts / groups;
    int thread = threadIdx.x, last = (int)positions[sequence], first = window ? max(0, last - window + 1) : 0;
    int heads = groups * each;
    for (int i = thread; i < R * width; i += 128) {
        int r = i / width;
        half_t bits = r < each ? q[((i64)sequence * heads + group * each + r) * width + i % width] : 0;
        query[r][i % width] = __uint_as_float((u32)bits << 16) * scale;
    }
    if (thread < R) { top[thread] = -3.0e38f; total[thread] = 0; }
    int pairs = width / 2, sides = 128 / pairs, side = thread / pairs, channel = thread % pairs * 2;
    float sum[R][2];
    _Pragma("unroll") for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = 0;
    __syncthreads();
    int blocks = last / 128 + 1, from_block = first / 128;
    int mine = (blocks - from_block + parts - 1) / parts;
    int begin = from_block + part * mine, end = min(blocks, begin + mine);
    for (int block = begin; block < end; block++) {
        i64 base = (tables[(i64)sequence * across + block] * groups + group) * 128 * width;
        int position = block * 128 + thread;
        bool is_seen = position <= last && position >= first;
        float score[R];
        _Pragma("unroll") for (int r = 0; r < R; r++) score[r] = 0;
        if (is_seen) {
            const half_t* key = keys + base + thread * width;
            for (int at = 0; at < width; at += 8) {
                float x[8];
                widen(*(const Eight*)(key + at), x);
                _Pragma("unroll") for (int r = 0; r < R; r++)
                    for (int i = 0; i < 8; i++) score[r] += x[i] * query[r][at + i];
            }
        }
        _Pragma("unroll") for (int r = 0; r < R; r++) {
            if (softcap > 0) score[r] = softcap * tanh_of(score[r] / softcap);
            if (!is_seen) score[r] = -3.0e38f;
            float high = score[r];
            for (int step = 16; step; step >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
            if (thread % 32 == 0) of_warp[r][thread / 32] = high;
        }
        __syncthreads();
        float fade[R];
        _Pragma("unroll") for (int r = 0; r < R; r++) {
            float high = fmaxf(fmaxf(of_warp[r][0], of_warp[r][1]), fmaxf(of_warp[r][2], of_warp[r][3]));
            float higher = fmaxf(high, top[r]);
            fade[r] = __expf(top[r] - higher);
            float mine_of_it = is_seen ? __expf(score[r] - higher) : 0;
            share[r][thread] = mine_of_it;
            for (int step = 16; step; step >>= 1) mine_of_it += __shfl_xor_sync(~0u, mine_of_it, step);
            if (thread % 32 == 0) sum_of_warp[r][thread / 32] = mine_of_it;
            score[r] = higher;
        }
        __syncthreads();
        if (thread == 0) {
            _Pragma("unroll") for (int r = 0; r < R; r++) {
                total[r] = total[r] * fade[r] + ((sum_of_warp[r][0] + sum_of_warp[r][1]) +
                                                 (sum_of_warp[r][2] + sum_of_warp[r][3]));
                top[r] = score[r];
            }
        }
        _Pragma("unroll") for (int r = 0; r < R; r++) { sum[r][0] *= fade[r]; sum[r][1] *= fade[r]; }
        int until = min(128, last - block * 128 + 1);
        const half_t* value = values + base + channel;
        for (int at = side; at < until; at += sides) {
            u32 both_of = *(const u32*)(value + at * width);
            float low = low_of(both_of), high = high_of(both_of);
            _Pragma("unroll") for (int r = 0; r < R; r++) {
                sum[r][0] += share[r][at] * low;
                sum[r][1] += share[r][at] * high;
            }
        }
        __syncthreads();
    }
    // The sides of one channel, by way of `query`, which nobody needs any more.
    for (int s = 0; s < sides; s++) {
        if (side == s)
            _Pragma("unroll") for (int r = 0; r < R; r++) {
                query[r][channel] = (s ? query[r][channel] : 0) + sum[r][0];
                query[r][channel + 1] = (s ? query[r][channel + 1] : 0) + sum[r][1];
            }
        __syncthreads();
    }
    for (int i = thread; i < each * (width + 2); i += 128) {
        int r = i / (width + 2), at = i % (width + 2);
        float* to = room + (((i64)sequence * heads + group * each + r) * parts + part) * (width + 2);
        to[at] = at == 0 ? top[r] : at == 1 ? total[r] : query[r][at - 2];
    }
}

#define DECODE(R)                                                                                                  \
    extern "C" __global__ void fast_decode_##R(const half_t* q, const half_t* keys, const half_t* values,          \
                                               const i64* tables, const i64* positions, float* room, int groups,   \
                                               int each, int width, int across, int parts, int window,             \
                                               float scale, float softcap) {                                       \
        decode<R>(q, keys, values, tables, positions, room, groups, each, width, across, parts, window, scale,     \
                  softcap);                                                                                        \
    }
DECODE(1)
DECODE(2)
DECODE(4)
DECODE(8)

// One block per sequence and head, a thread per channel: the parts' sum.
extern "C" __global__ void fast_decode_sum(const float* room, half_t* out, int width, int parts) {
    const float* from = room + (i64)blockIdx.x * parts * (width + 2);
    float top = -3.0e38f, total = 0, sum = 0;
    for (int part = 0; part < parts; part++) top = fmaxf(top, from[part * (width + 2)]);
    for (int part = 0; part < parts; part++) {
        const float* of = from + part * (width + 2);
        float by = of[1] > 0 ? __expf(of[0] - top) : 0;
        total += by * of[1];
        sum += by * of[2 + threadIdx.x];
    }
    float x = sum / total;
    out[(i64)blockIdx.x * width + threadIdx.x] = (half_t)(both(x, 0) & 0xffff);
}

// A load that stays where it is written, so that the next ones are asked for before this one is here.
__device__ inline Eight read_once(const Eight* from) {
    Eight x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                 : "l"(from));
    return x;
}

// y [rows] = W x for one x: a warp per row, all of its loads in flight. y is bfloat16, or float32 where wide.
extern "C" __global__ void fast_row_product(const half_t* x, const half_t* weight, half_t* y, float* wide,
                                            int rows, int columns) {
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const Eight* from = (const Eight*)(weight + (i64)row * columns);
    const Eight* by = (const Eight*)x;
    float sum = 0;
    int pieces = columns / 8, at = lane;
    for (; at + 7 * 32 < pieces; at += 8 * 32) {
        Eight kept[8];
#pragma unroll
        for (int i = 0; i < 8; i++) kept[i] = read_once(from + at + i * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float a[8], b[8];
            widen(kept[i], a);
            widen(by[at + i * 32], b);
#pragma unroll
            for (int k = 0; k < 8; k++) sum += a[k] * b[k];
        }
    }
    for (; at < pieces; at += 32) {
        float a[8], b[8];
        widen(from[at], a);
        widen(by[at], b);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += a[k] * b[k];
    }
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) {
        if (wide) wide[row] = sum;
        else y[row] = (half_t)(both(sum, 0) & 0xffff);
    }
}

"""Activations in NumPy: the fp32 steps of the reference's docstring, one operation per step."""

import numpy as np

F = np.float32
FMAX = np.finfo(F).max


def no_errors():
    return np.errstate(all="ignore")


def hexf(text):
    return F(float.fromhex(text))


def bits(x):
    return x.view(np.uint32)


def clamp(x, low, high):
    return np.minimum(np.maximum(x, F(low)), F(high))  # both keep NaN


def power(m):
    return (m << np.uint32(23)).view(F)


def exp(x):
    """Return exp(x) with fp32 steps, for x clamped to [-104, 89]."""
    x = clamp(x, -104, 89)
    z = x * hexf("0x1.715476p+0") + F(12583166)
    n = z - F(12583166)
    r = (x - n * hexf("0x1.62e4p-1")) - n * hexf("0x1.7f7d1cp-20")
    q = hexf("0x1.6d721ap-10") * r + hexf("0x1.12266ap-7")
    q = (q * r + hexf("0x1.5554c8p-5")) * r + hexf("0x1.5554b2p-3")
    q = q * r + F(0.5)
    p = (q * (r * r) + r) + F(1)
    a = bits(z) >> np.uint32(1)
    b = bits(z) - a
    return (p * power(a)) * power(b)


def tanh(x):
    """Return tanh(x) with fp32 steps."""
    a = np.minimum(np.abs(x), F(10))
    n = np.floor(a * hexf("0x1.715476p+1"))
    z = n + F(12583038)
    r = (a - n * hexf("0x1.62e4p-2")) - n * hexf("0x1.7f7d1cp-21")
    w = r * r
    q = hexf("0x1.3f46fp-6") * w + hexf("-0x1.b83438p-5")
    q = (q * w + hexf("0x1.110c54p-3")) * w + hexf("-0x1.55554ep-2")
    t = q * (w * r) + r
    s = power(bits(z))
    u = t * (s + F(0.5)) + (s - F(0.5))
    return np.copysign(u / (u + (F(1) - t)), x)


def sigmoid(v):
    return F(1) / (F(1) + exp(-v))


def relu(x):
    return np.where(x <= 0, F(0), x)


def logistic(x, v):
    """Return x * sigmoid(v) and its slope."""
    s = sigmoid(v)
    w = clamp(v, -(2.0**32), 2.0**32)
    return np.maximum(x, -FMAX) * s, (w * s) * (F(1) - s) + s


def gelu(x):
    """Return the tanh approximation of GELU and its slope."""
    c0, c1, c2 = F(0.79788456), F(0.03567741), F(0.1070322243)
    t = tanh(x * (c0 + c1 * (x * x)))
    w = clamp(x, -(2.0**32), 2.0**32)
    steep = (F(1) - t * t) * (c0 + c2 * (w * w))
    return np.maximum(x, -FMAX) * (F(0.5) + F(0.5) * t), (F(0.5) * w) * steep + F(0.5) * (F(1) + t)


def curve(name, x, alpha=1.702, limit=7.0):
    """Return the value and the slope of a curve at x."""
    with no_errors():
        if name == "relu":
            return relu(x), np.where(x > 0, F(1), relu(x))
        if name == "srelu":
            return relu(x) * relu(x), relu(x) + relu(x)
        if name == "gelu":
            return gelu(x)
        if name == "silu":
            return logistic(x, x)
        if name == "qgelu":
            return logistic(x, F(1.702) * x)
        assert name == "clamped_silu"
        y = np.minimum(x, F(limit))
        value, slope = logistic(y, F(alpha) * y)
        return value, np.where(x > F(limit), F(0), slope)


def elements(act, x, grad=None):
    """Return the activation of x, or with ``grad`` the gradient of x."""
    with no_errors():
        if not act.is_gated:
            value, slope = curve(act.curve, x)
            return value if grad is None else slope * grad
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        value, slope = curve(act.curve, a, act.alpha, act.limit)
        gate, passes = b, np.full(b.shape, True)
        if act.is_clamped:
            gate = clamp(b, -act.limit, act.limit) + F(1)
            passes = ~(np.abs(b) > F(act.limit))
        if grad is None:
            return value * gate
        grad_b = np.where(passes, value * grad, F(0))
        return np.concatenate([(slope * gate) * grad, grad_b], axis=-1)

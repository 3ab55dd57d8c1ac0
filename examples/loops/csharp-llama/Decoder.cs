// The decode loop of llama-gqa (layout optimum-decoder-only), written by kvdoctor 0.1.0.
//
//     using var decoder = new Decoder("path/to/the/model");
//     long[][] tokens = decoder.Generate([[5, 6, 7]], most: 20);
//
// All names, types and sizes are those of the cache contract of this model; README.md says it in words.

using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Decode;

/// <summary>The model, and the cache of one batch of sequences.</summary>
/// <remarks>
/// The cache goes from step to step as the runtime made it, without a copy to managed memory.
/// A value is disposed as soon as the next step has replaced it.
/// </remarks>
public sealed class Decoder : IDisposable
{
    private const string DecoderFile = "model.onnx";

    /// <summary>The most tokens that a sequence may have.</summary>
    private const int MostTokens = 64;

    /// <summary>Token ids are smaller than this.</summary>
    private const int Vocabulary = 128;

    /// <summary>A trace has so many elements of a tensor at most.</summary>
    private const int MostData = 64;

    private static readonly Slot[] Cache =
    [
        new()
        {
            Past = "past_key_values.0.key",
            Made = "present.0.key",
            Present = "present.0.key",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.0.value",
            Made = "present.0.value",
            Present = "present.0.value",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.1.key",
            Made = "present.1.key",
            Present = "present.1.key",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.1.value",
            Made = "present.1.value",
            Present = "present.1.value",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
    ];

    private static readonly string[] Outputs =
    [
        "logits",
        "present.0.key",
        "present.0.value",
        "present.1.key",
        "present.1.value",
    ];

    private readonly RunOptions _runOptions = new();
    private readonly InferenceSession _decoder;

    // In the order of the slots; null before the first call.
    private readonly OrtValue?[] _cache = new OrtValue?[Cache.Length];
    private long[] _padding = [];

    // Takes a line for each call; null where calls are not written down.
    private Action<string>? _trace = Environment.GetEnvironmentVariable("KVDOCTOR_TRACE") is { Length: > 0 } file
        ? AppendTo(file)
        : null;

    // The run that the lines belong to.
    private string? _run;

    /// <summary>Opens the files in a folder.</summary>
    public Decoder(string folder, SessionOptions? options = null)
    {
        using SessionOptions? standard = options is null ? new SessionOptions() : null;
        options ??= standard!;
        _decoder = new InferenceSession(Path.Combine(folder, DecoderFile), options);
    }

    /// <summary>Tokens in the cache, padding counted.</summary>
    public int Length { get; private set; }

    /// <summary>The most tokens that a sequence may have, padding counted.</summary>
    public int Limit => MostTokens;

    /// <summary>Gives each call from now on to <paramref name="lines"/>, as <c>kvdoctor step-test MODEL --trace</c> reads it.</summary>
    /// <param name="run">What the lines belong to, or null.</param>
    /// <param name="lines">Takes a line of JSON; null ends it.</param>
    public void Trace(string? run, Action<string>? lines)
    {
        _run = run;
        _trace = lines;
    }

    /// <summary>Begins anew: no sequences.</summary>
    public void Reset()
    {
        Clear();
    }

    /// <summary>Releases the cache and the sessions.</summary>
    public void Dispose()
    {
        Reset();
        _decoder.Dispose();
        _runOptions.Dispose();
    }

    /// <summary>Begins sequences with their prompts; returns the last logits of each.</summary>
    /// <remarks>
    /// Shorter prompts are padded on the left: the mask hides the padding, and positions do not count it.
    /// </remarks>
    public float[][] Prefill(long[][] prompts)
    {
        RequireIds(prompts);
        int longest = prompts.Max(prompt => prompt.Length);
        Clear();
        _padding = Array.ConvertAll(prompts, prompt => (long)(longest - prompt.Length));
        long[][] tokens = Array.ConvertAll(prompts, prompt => (long[])[.. new long[longest - prompt.Length], .. prompt]);
        return Advance(tokens);
    }

    /// <summary>Continues each sequence with its new tokens; returns logits as <see cref="Prefill"/> does.</summary>
    public float[][] Step(long[][] tokens)
    {
        if (Length == 0)
        {
            throw new InvalidOperationException("begin with Prefill()");
        }

        RequireIds(tokens);
        if (tokens.Length != _padding.Length)
        {
            throw new ArgumentException($"a step takes new tokens of each of {_padding.Length} sequences");
        }

        return Advance(tokens);
    }

    /// <summary>Forgets the last <paramref name="count"/> tokens of every sequence. At least one token must stay.</summary>
    public void Rewind(int count)
    {
        long shortest = Length - _padding.DefaultIfEmpty(0).Max();
        if (count < 0 || count >= shortest)
        {
            throw new ArgumentException($"cannot forget {count} of {shortest} tokens");
        }

        Length -= count;
        for (int i = 0; i < Cache.Length; i++)
        {
            if (Cache[i].Cut)
            {
                Replace(i, Joined(Cache[i].LengthAxis!.Value, [new Piece(_cache[i]!, 0, Length)]));
            }
        }
    }

    /// <summary>Makes row i of the batch a copy of what row <c>rows[i]</c> was, as a beam search needs it.</summary>
    public void Reorder(int[] rows)
    {
        if (Length == 0 || rows.Length == 0 || rows.Any(row => row < 0 || row >= _padding.Length))
        {
            throw new ArgumentException("there is no such row");
        }

        for (int i = 0; i < Cache.Length; i++)
        {
            if (_cache[i] is { } value && Cache[i].BatchAxis is { } axis)
            {
                Replace(i, Reordered(value, axis, rows));
            }
        }

        _padding = Array.ConvertAll(rows, row => _padding[row]);
    }

    /// <summary>Decodes until every sequence has ended; returns the new tokens of each, the stop token not among them.</summary>
    /// <param name="prompts">What each sequence begins with.</param>
    /// <param name="most">The most new tokens; none are made beyond <see cref="Limit"/>.</param>
    /// <param name="stop">Tokens that end a sequence.</param>
    /// <param name="choose">Picks a token of the logits of a sequence; without it the likeliest is taken.</param>
    /// <param name="onToken">Called for each new token with the row and the token.</param>
    public long[][] Generate(
        long[][] prompts,
        int most = 20,
        long[]? stop = null,
        Func<float[], long>? choose = null,
        Action<int, long>? onToken = null)
    {
        if (most < 1)
        {
            throw new ArgumentException("most is 1 or more");
        }

        choose ??= Likeliest;
        List<long>[] made = Array.ConvertAll(prompts, _ => new List<long>());
        bool[] running = Array.ConvertAll(prompts, _ => true);
        float[][] logits = Prefill(prompts);
        while (true)
        {
            long[] chosen = Array.ConvertAll(logits, row => choose(row));
            for (int row = 0; row < chosen.Length; row++)
            {
                running[row] = running[row] && !(stop ?? Array.Empty<long>()).Contains(chosen[row]);
                if (running[row])
                {
                    made[row].Add(chosen[row]);
                    onToken?.Invoke(row, chosen[row]);
                }
            }

            if (!running.Contains(true) || made.Max(row => row.Count) >= most || Length >= Limit)
            {
                return Array.ConvertAll(made, row => row.ToArray());
            }

            logits = Step(Array.ConvertAll(chosen, token => new[] { token }));
        }
    }

    /// <summary>The likeliest token.</summary>
    public static long Likeliest(float[] logits) => Array.IndexOf(logits, logits.Max());

    private static void RequireIds(long[][] rows)
    {
        if (rows.Length == 0 || rows.Any(row => row.Length == 0))
        {
            throw new ArgumentException("each sequence needs at least one token");
        }

        if (rows.Any(row => row.Any(id => id < 0 || id >= Vocabulary)))
        {
            throw new ArgumentException($"token ids are 0 to {Vocabulary - 1}");
        }
    }

    private void Clear()
    {
        Length = 0;
        _padding = [];
        for (int i = 0; i < _cache.Length; i++)
        {
            Replace(i, null);
        }
    }

    private void Replace(int slot, OrtValue? value)
    {
        _cache[slot]?.Dispose();
        _cache[slot] = value;
    }

    /// <summary>Runs one call on new tokens and keeps what it returns of the cache.</summary>
    private float[][] Advance(long[][] tokens)
    {
        int count = tokens[0].Length;
        if (tokens.Any(row => row.Length != count))
        {
            throw new ArgumentException("the rows of a batch have different lengths");
        }

        if (Length + count > Limit)
        {
            throw new ArgumentException($"a sequence has at most {Limit} tokens here");
        }

        bool first = Length == 0;
        if (first)
        {
            FillFirst(tokens.Length);
        }

        Dictionary<string, OrtValue> outputs;
        using (Feeds fed = FeedsOf(tokens))
        {
            outputs = Run(_decoder, DecoderFile, fed, Outputs);
        }

        for (int i = 0; i < Cache.Length; i++)
        {
            string? name = Cache[i].Present;
            if (name is not null && outputs.Remove(name, out OrtValue? value))
            {
                Replace(i, value);
            }
        }

        Length += count;
        float[][] logits = LastRows(outputs["logits"], tokens.Length);
        foreach (OrtValue value in outputs.Values)
        {
            value.Dispose();
        }

        return logits;
    }

    private Feeds FeedsOf(long[][] tokens)
    {
        long batch = tokens.Length;
        long count = tokens[0].Length;
        long past = Length;
        long total = Length + tokens[0].Length;
        var fed = new Feeds();
        fed.Add("input_ids", Tensor([batch, count], Flat(tokens), x => x));
        fed.Add("attention_mask", AttentionMask([batch, total], total, _padding, x => x));
        fed.Add("position_ids", Positions([batch, count], past, _padding, x => x));
        for (int i = 0; i < Cache.Length; i++)
        {
            fed.Borrow(Cache[i].Past, _cache[i]!);
        }

        return fed;
    }

    /// <summary>What the first call is fed: zeros.</summary>
    private void FillFirst(long batch)
    {
        Replace(0, Zeros(TensorElementType.Float, [batch, 2, 0, 8]));
        Replace(1, Zeros(TensorElementType.Float, [batch, 2, 0, 8]));
        Replace(2, Zeros(TensorElementType.Float, [batch, 2, 0, 8]));
        Replace(3, Zeros(TensorElementType.Float, [batch, 2, 0, 8]));
    }

    /// <summary>Runs one call; what it returns stays with the runtime until it is read.</summary>
    private Dictionary<string, OrtValue> Run(InferenceSession session, string file, Feeds fed, string[] names)
    {
        Dictionary<string, OrtValue> got = new();
        string? error = null;
        try
        {
            // The collection is not disposed: it would dispose the values, which are fed in the next step.
            foreach ((string name, OrtValue value) in names.Zip(session.Run(_runOptions, fed.Names, fed.Values, names)))
            {
                got[name] = value;
            }

            return got;
        }
        catch (OnnxRuntimeException raised)
        {
            error = raised.Message;
            throw;
        }
        finally
        {
            if (_trace is not null)
            {
                _trace(LineOf(file, fed.Names.Zip(fed.Values), got.Select(one => (one.Key, one.Value)), error));
            }
        }
    }

    private static long[] ShapeOf(OrtValue value) => value.GetTensorTypeAndShape().Shape;

    private static OrtValue Tensor<TFrom, T>(long[] shape, TFrom[] entries, Converter<TFrom, T> convert)
        where T : unmanaged
        => OrtValue.CreateTensorValueFromMemory(Array.ConvertAll(entries, convert), shape);

    private static int Count(IEnumerable<long> shape) => checked((int)shape.Aggregate(1L, (product, size) => product * size));

    private static long[] Flat(long[][] rows) => rows.SelectMany(row => row).ToArray();

    /// <summary>1 for tokens; 0 for padding on the left, and for what lies behind the last token. Columns are the cache.</summary>
    private static OrtValue AttentionMask<T>(long[] shape, long total, long[] padding, Converter<long, T> convert)
        where T : unmanaged
    {
        int columns = (int)shape[^1];
        long[] entries = new long[Count(shape)];
        for (int i = 0; i < entries.Length; i++)
        {
            long padded = padding.Length == 0 ? 0 : padding[(long)i * padding.Length / entries.Length];
            entries[i] = i % columns >= padded && i % columns < total ? 1 : 0;
        }

        return Tensor(shape, entries, convert);
    }

    /// <summary>The positions of the new tokens; padding on the left is not counted.</summary>
    private static OrtValue Positions<T>(long[] shape, long past, long[] padding, Converter<long, T> convert)
        where T : unmanaged
    {
        long[] entries = new long[Count(shape)];
        for (int i = 0; i < entries.Length; i++)
        {
            long padded = padding.Length == 0 ? 0 : padding[i / shape[^1] % padding.Length];
            entries[i] = Math.Max(past + (i % shape[^1]) - padded, 0);
        }

        return Tensor(shape, entries, convert);
    }

    private static OrtValue Zeros(TensorElementType type, long[] shape)
    {
        OrtValue value = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, type, shape);
        value.GetTensorMutableRawData().Clear();
        return value;
    }

    /// <summary>Pieces one after the other along an axis. They are copied as bytes, whatever the element type is.</summary>
    private static OrtValue Joined(int axis, Piece[] pieces)
    {
        OrtTensorTypeAndShapeInfo info = pieces[0].Value.GetTensorTypeAndShape();
        long[] shape = info.Shape;
        int outer = Count(shape.Take(axis));
        int entry = Count(shape.Skip(axis + 1)) * ElementSize(info.ElementDataType);
        long[] lengths = Array.ConvertAll(pieces, piece => ShapeOf(piece.Value)[axis]);
        foreach ((Piece piece, long length) in pieces.Zip(lengths))
        {
            if (piece.First < 0 || piece.Count < 0 || piece.First + piece.Count > length)
            {
                throw new InvalidOperationException($"the cache has {length} entries, too few for this call");
            }
        }

        long[] wholeShape = [.. shape];
        wholeShape[axis] = pieces.Sum(piece => piece.Count);
        OrtValue whole = OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, info.ElementDataType, wholeShape);
        Span<byte> rest = whole.GetTensorMutableRawData();
        for (int block = 0; block < outer; block++)
        {
            for (int i = 0; i < pieces.Length; i++)
            {
                int begin = checked((int)((block * lengths[i]) + pieces[i].First) * entry);
                int bytes = checked((int)pieces[i].Count * entry);
                pieces[i].Value.GetTensorMutableRawData().Slice(begin, bytes).CopyTo(rest);
                rest = rest[bytes..];
            }
        }

        return whole;
    }

    private static int ElementSize(TensorElementType type) => type switch
    {
        TensorElementType.Float => 4,
        TensorElementType.Int64 => 8,
        _ => throw new NotSupportedException($"a tensor of element type {type} in the cache"),
    };

    /// <summary>The rows of a tensor in another order; a row of the batch is <paramref name="heads"/> rows of it.</summary>
    private static OrtValue Reordered(OrtValue value, int axis, int[] rows, int heads = 1)
        => Joined(axis, Array.ConvertAll(rows, row => new Piece(value, (long)row * heads, heads)));

    /// <summary>The last row of logits of each sequence.</summary>
    private static float[][] LastRows(OrtValue value, int batch)
    {
        ReadOnlySpan<float> all = value.GetTensorDataAsSpan<float>();
        long[] shape = ShapeOf(value); // only logits of rank 3 have a row for each new token
        int vocabulary = shape.Length == 3 ? (int)shape[^1] : all.Length / batch;
        float[][] rows = new float[batch][];
        for (int row = 0; row < batch; row++)
        {
            int end = (row + 1) * (all.Length / batch);
            rows[row] = all[(end - vocabulary)..end].ToArray();
        }

        return rows;
    }

    /// <summary>Takes lines for the end of a file.</summary>
    internal static Action<string> AppendTo(string file) => line => File.AppendAllText(file, line + "\n");

    /// <summary>What a call was fed and returned, as a line of JSON.</summary>
    private string LineOf(
        string file,
        IEnumerable<(string Name, OrtValue Value)> fed,
        IEnumerable<(string Name, OrtValue Value)> got,
        string? error)
    {
        Dictionary<string, object?> line = new();
        if (_run is not null)
        {
            line["run"] = _run;
        }

        line["file"] = file;
        line["fed"] = fed.ToDictionary(one => one.Name, one => Described(one.Value));
        if (error is null)
        {
            line["got"] = got.ToDictionary(one => one.Name, one => Described(one.Value));
        }

        line["error"] = error;
        return JsonSerializer.Serialize(line);
    }

    private static Dictionary<string, object> Described(OrtValue value)
    {
        OrtTensorTypeAndShapeInfo info = value.GetTensorTypeAndShape();
        return new()
        {
            ["dtype"] = (int)info.ElementDataType,
            ["shape"] = info.Shape,
            [info.ElementCount <= MostData ? "data" : "sample"] = Numbers(value),
        };
    }

    private static object?[] Numbers(OrtValue value) => value.GetTensorTypeAndShape().ElementDataType switch
    {
        TensorElementType.Float => Some<float>(value, x => Finite(x)),
        TensorElementType.Int64 => Some<long>(value, x => x),
        var type => throw new NotSupportedException($"a tensor of element type {type} in a trace"),
    };

    /// <summary>All elements of a small tensor; of a larger one some, the first and the last among them.</summary>
    private static object?[] Some<T>(OrtValue value, Converter<T, object?> convert)
        where T : unmanaged
    {
        ReadOnlySpan<T> all = value.GetTensorDataAsSpan<T>();
        object?[] some = new object?[Math.Min(all.Length, MostData)];
        for (int k = 0; k < some.Length; k++)
        {
            int i = all.Length <= MostData ? k : (int)((long)k * (all.Length - 1) / (MostData - 1));
            some[k] = convert(all[i]);
        }

        return some;
    }

    /// <summary>JSON has no NaN and no infinity.</summary>
    private static object? Finite(float number) => float.IsFinite(number) ? number : null;

    /// <summary>One tensor of the cache.</summary>
    private sealed class Slot
    {
        /// <summary>The input that it is fed to.</summary>
        public required string Past { get; init; }

        /// <summary>The output that first fills it, of the first call.</summary>
        public required string? Made { get; init; }

        /// <summary>The output of each later call that carries it on; null where the first value is kept.</summary>
        public required string? Present { get; init; }

        /// <summary>The axis of the sequences.</summary>
        public required int? BatchAxis { get; init; }

        /// <summary>The axis of the tokens.</summary>
        public required int? LengthAxis { get; init; }

        /// <summary>Whether going back cuts it.</summary>
        public required bool Cut { get; init; }
    }

    /// <summary>Some entries along an axis of a tensor.</summary>
    private sealed record Piece(OrtValue Value, long First, long Count);

    /// <summary>The inputs of one call. Disposes those of this call alone, not those it borrows.</summary>
    private sealed class Feeds : IDisposable
    {
        private readonly List<OrtValue> _own = [];

        public List<string> Names { get; } = [];

        public List<OrtValue> Values { get; } = [];

        public void Add(string name, OrtValue value)
        {
            _own.Add(value);
            Borrow(name, value);
        }

        public void Borrow(string name, OrtValue value)
        {
            Names.Add(name);
            Values.Add(value);
        }

        public void Dispose() => _own.ForEach(value => value.Dispose());
    }
}

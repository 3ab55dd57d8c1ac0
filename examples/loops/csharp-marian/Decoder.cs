// The decode loop of marian-4.57.6 (layout optimum-merged), written by kvdoctor 0.1.0.
//
//     using var decoder = new Decoder("path/to/the/model");
//     decoder.Encode(source);
//     long[][] tokens = decoder.Generate([[5, 6, 7]], most: 20);
//
// All names, types and sizes are those of the cache contract of this model; README.md says it in words.

using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Decode;

/// <summary>What the sequences are about: int64[batch, encoder_input].</summary>
public sealed record Source(long[] Shape, long[] Entries);

/// <summary>The model, and the cache of one batch of sequences.</summary>
/// <remarks>
/// The cache goes from step to step as the runtime made it, without a copy to managed memory.
/// A value is disposed as soon as the next step has replaced it.
/// </remarks>
public sealed class Decoder : IDisposable
{
    private const string EncoderFile = "encoder_model.onnx";
    private const string DecoderFile = "decoder_model_merged.onnx";

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
            Past = "past_key_values.0.decoder.key",
            Made = "present.0.decoder.key",
            Present = "present.0.decoder.key",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.0.decoder.value",
            Made = "present.0.decoder.value",
            Present = "present.0.decoder.value",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.0.encoder.key",
            Made = "present.0.encoder.key",
            Present = null,
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = false,
        },
        new()
        {
            Past = "past_key_values.0.encoder.value",
            Made = "present.0.encoder.value",
            Present = null,
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = false,
        },
        new()
        {
            Past = "past_key_values.1.decoder.key",
            Made = "present.1.decoder.key",
            Present = "present.1.decoder.key",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.1.decoder.value",
            Made = "present.1.decoder.value",
            Present = "present.1.decoder.value",
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = true,
        },
        new()
        {
            Past = "past_key_values.1.encoder.key",
            Made = "present.1.encoder.key",
            Present = null,
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = false,
        },
        new()
        {
            Past = "past_key_values.1.encoder.value",
            Made = "present.1.encoder.value",
            Present = null,
            BatchAxis = 0,
            LengthAxis = 2,
            Cut = false,
        },
    ];

    private static readonly string[] EncoderOutputs =
    [
        "last_hidden_state",
    ];

    private static readonly string[] FirstOutputs =
    [
        "logits",
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.0.encoder.key",
        "present.0.encoder.value",
        "present.1.decoder.key",
        "present.1.decoder.value",
        "present.1.encoder.key",
        "present.1.encoder.value",
    ];

    private static readonly string[] Outputs =
    [
        "logits",
        "present.0.decoder.key",
        "present.0.decoder.value",
        "present.1.decoder.key",
        "present.1.decoder.value",
    ];

    private readonly RunOptions _runOptions = new();
    private readonly InferenceSession _encoder;
    private readonly InferenceSession _decoder;

    // In the order of the slots; null before the first call.
    private readonly OrtValue?[] _cache = new OrtValue?[Cache.Length];

    // Of the encoder, for all sequences until the next Encode().
    private Dictionary<string, OrtValue> _made = new();
    private long[][]? _sourceMask;

    // Whether the source is no longer that of the caller, row by row.
    private bool _moved;

    // How many sequences the source is for.
    private long _sources;
    private int _batch;

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
        _encoder = new InferenceSession(Path.Combine(folder, EncoderFile), options);
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

    /// <summary>Begins anew: no sequences, and nothing encoded.</summary>
    public void Reset()
    {
        foreach (OrtValue value in _made.Values)
        {
            value.Dispose();
        }

        _made = new();
        _sourceMask = null;
        _moved = false;
        Clear();
    }

    /// <summary>Releases the cache and the sessions.</summary>
    public void Dispose()
    {
        Reset();
        _decoder.Dispose();
        _encoder.Dispose();
        _runOptions.Dispose();
    }

    /// <summary>Runs the encoder; the sequences after it are about this <paramref name="source"/>.</summary>
    /// <param name="source">What is read.</param>
    /// <param name="mask">0 for padding on the right, a row for each sequence; without it all of the source is read.</param>
    public void Encode(Source source, long[][]? mask = null)
    {
        if (source.Shape.Length != 2)
        {
            throw new ArgumentException("the source has 2 axes");
        }

        if (source.Shape.Any(size => size < 1))
        {
            throw new ArgumentException("the source is empty");
        }

        if (source.Entries.LongLength != source.Shape.Aggregate(1L, (product, size) => checked(product * size)))
        {
            throw new ArgumentException(
                $"a source of {source.Entries.Length} numbers has not the shape [{string.Join(", ", source.Shape)}]");
        }

        if (source.Entries.Any(id => id < 0))
        {
            throw new ArgumentException("the ids of the source are 0 or more");
        }

        long batch = source.Shape[0];
        long sourceLength = source.Shape[1];
        if (mask is not null && (mask.Length != batch || mask.Any(row => row.Length != sourceLength)))
        {
            string lengths = string.Join(", ", mask.Select(row => row.Length).Distinct());
            throw new ArgumentException(
                $"the mask of this source has the shape [{batch}, {sourceLength}]; "
                + $"got {mask.Length} rows of {lengths} numbers");
        }

        Reset();
        _sources = source.Shape[0];
        _sourceMask = mask;
        using var fed = new Feeds();
        fed.Add("input_ids", Tensor(source.Shape, source.Entries, x => x));
        fed.Add("attention_mask", EncoderMask([batch, sourceLength], _sourceMask, x => x));
        _made = Run(_encoder, EncoderFile, fed, EncoderOutputs);
    }

    /// <summary>Begins sequences with their prompts; returns the last logits of each.</summary>
    public float[][] Prefill(long[][] prompts)
    {
        if (_made.Count == 0 || _moved)
        {
            throw new InvalidOperationException("begin with Encode(), also after Reorder()");
        }

        if (prompts.Length != _sources)
        {
            throw new ArgumentException($"{prompts.Length} prompts for {_sources} sources");
        }

        RequireIds(prompts);
        int longest = prompts.Max(prompt => prompt.Length);
        if (prompts.Any(prompt => prompt.Length < longest))
        {
            throw new ArgumentException("this model takes no padding: the prompts of a batch must have the same length");
        }

        Clear();
        _batch = prompts.Length;
        return Advance(prompts);
    }

    /// <summary>Continues each sequence with its new tokens; returns logits as <see cref="Prefill"/> does.</summary>
    public float[][] Step(long[][] tokens)
    {
        if (Length == 0)
        {
            throw new InvalidOperationException("begin with Prefill()");
        }

        RequireIds(tokens);
        if (tokens.Length != _batch)
        {
            throw new ArgumentException($"a step takes new tokens of each of {_batch} sequences");
        }

        return Advance(tokens);
    }

    /// <summary>Forgets the last <paramref name="count"/> tokens of every sequence. At least one token must stay.</summary>
    public void Rewind(int count)
    {
        int shortest = Length;
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
        if (Length == 0 || rows.Length == 0 || rows.Any(row => row < 0 || row >= _batch))
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

        _batch = rows.Length;
        foreach (string name in _made.Keys.ToArray())
        {
            OrtValue old = _made[name];
            _made[name] = Reordered(old, 0, rows);
            old.Dispose();
        }

        _moved = true;

        if (_sourceMask is { } mask)
        {
            _sourceMask = Array.ConvertAll(rows, row => mask[row]);
        }
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
        _batch = 0;
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
            outputs = Run(_decoder, DecoderFile, fed, first ? FirstOutputs : Outputs);
        }

        for (int i = 0; i < Cache.Length; i++)
        {
            string? name = first ? Cache[i].Made : Cache[i].Present;
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
        long encoderLength = EncoderLength();
        var fed = new Feeds();
        fed.Add("encoder_attention_mask", EncoderMask([batch, encoderLength], _sourceMask, x => x));
        fed.Add("input_ids", Tensor([batch, count], Flat(tokens), x => x));
        fed.Borrow("encoder_hidden_states", _made["last_hidden_state"]);
        fed.Add("use_cache_branch", Filled<bool>([1], past > 0));
        for (int i = 0; i < Cache.Length; i++)
        {
            fed.Borrow(Cache[i].Past, _cache[i]!);
        }

        return fed;
    }

    /// <summary>What the first call is fed: zeros that this branch of the graph does not read.</summary>
    private void FillFirst(long batch)
    {
        Replace(0, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(1, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(2, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(3, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(4, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(5, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(6, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
        Replace(7, Zeros(TensorElementType.Float, [batch, 4, 1, 8]));
    }

    /// <summary>The number of encoder states.</summary>
    private long EncoderLength() => ShapeOf(_made["last_hidden_state"])[1];

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

    private static OrtValue Filled<T>(long[] shape, T number)
        where T : unmanaged
        => OrtValue.CreateTensorValueFromMemory(Enumerable.Repeat(number, Count(shape)).ToArray(), shape);

    private static long[] Flat(long[][] rows) => rows.SelectMany(row => row).ToArray();

    /// <summary>The mask given to Encode, else ones: one of another length belongs to the encoder's input alone.</summary>
    private static OrtValue EncoderMask<T>(long[] shape, long[][]? given, Converter<long, T> convert)
        where T : unmanaged
    {
        bool fits = given is { Length: > 0 } && shape.SequenceEqual(new long[] { given.Length, given[0].Length });
        return Tensor(shape, fits ? Flat(given!) : Enumerable.Repeat(1L, Count(shape)).ToArray(), convert);
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
        TensorElementType.Bool => 1,
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
        TensorElementType.Bool => Some<bool>(value, x => x),
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

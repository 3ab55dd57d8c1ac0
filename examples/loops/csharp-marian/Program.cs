// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

using System.Diagnostics;
using System.Globalization;
using Microsoft.ML.OnnxRuntime;

namespace Decode;

internal static class Program
{
    private const string Usage = """
        usage: decode --model FOLDER --prompt IDS --source IDS [options]
        IDS are token ids with commas between them.
          --model FOLDER       folder of the model files
          --prompt IDS         once for each sequence
          --source IDS         ids for the encoder, once for each sequence
          --most N             the most new tokens (20)
          --stop IDS           ids that end a sequence
          --follow IDS         continue with these ids whatever is likeliest; once for each sequence
          --temperature T      0 takes the likeliest token, otherwise sampled (0)
          --top-k K            sample from so many tokens (50)
          --seed N             of the sampling (0)
          --self-test TESTS    with --follow: also rewind,reorder, and compare
          --provider NAME      where the graphs run: cpu, cuda, dml, coreml, ... (cpu)

        or: decode --model FOLDER --probe FILE [--result FILE] [options of the model]
          --probe FILE         the arguments of a run on each line
          --result FILE        the file to write: all calls and the tokens (result.jsonl)
        """;

    private static readonly string[] ModelOptions = ["--model", "--provider"];

    private static readonly string[] ProbeOptions = [.. ModelOptions, "--probe", "--result"];

    private static readonly string[] DecodeOptions =
    [
        .. ModelOptions,
        .. Run.Options,
        "--most",
        "--stop",
        "--temperature",
        "--top-k",
        "--seed",
    ];

    private static int Main(string[] arguments)
    {
        if (arguments.Contains("--help"))
        {
            Console.WriteLine(Usage);
            return 0;
        }

        try
        {
            return Start(arguments) ? 0 : 1;
        }
        catch (FormatException error)
        {
            Console.Error.WriteLine($"error: {error.Message}");
            Console.Error.WriteLine(Usage);
            return 2;
        }
        catch (Exception error) when (error
            is OnnxRuntimeException
            or ArgumentException
            or InvalidOperationException
            or NotSupportedException
            or OverflowException
            or IOException
            or UnauthorizedAccessException
            or DllNotFoundException)
        {
            Console.Error.WriteLine($"error: {error.Message}");
            return 1;
        }
    }

    /// <summary>Returns whether a probe showed the expected tokens; decoding is always right.</summary>
    private static bool Start(string[] arguments)
    {
        bool probes = arguments.Contains("--probe");
        ILookup<string, string> given = Arguments.Parse(arguments, probes ? ProbeOptions : DecodeOptions);
        using var options = new SessionOptions();
        Providers.Add(options, given["--provider"].LastOrDefault("cpu"));
        using var decoder = new Decoder(Arguments.Required(given, "--model"), options);
        if (probes)
        {
            return DecodeProbe(decoder, given);
        }

        DecodeOnce(decoder, given);
        return true;
    }

    private static bool DecodeProbe(Decoder decoder, ILookup<string, string> given)
    {
        string file = Arguments.Required(given, "--probe");
        string result = given["--result"].LastOrDefault("result.jsonl");
        string[] lines = File.ReadAllLines(file);
        if (Path.GetFullPath(file) == Path.GetFullPath(result))
        {
            throw new FormatException("--result is the file of --probe itself");
        }

        File.WriteAllText(result, string.Empty);
        return new Probe(decoder, Decoder.AppendTo(result), Console.WriteLine).Decode(lines);
    }

    private static void DecodeOnce(Decoder decoder, ILookup<string, string> given)
    {
        int most = Arguments.Integer(given["--most"].LastOrDefault("20"));
        int topK = Arguments.Integer(given["--top-k"].LastOrDefault("50"));
        int seed = Arguments.Integer(given["--seed"].LastOrDefault("0"));
        float temperature = Arguments.Number(given["--temperature"].LastOrDefault("0"));
        if (topK < 1 || !(temperature >= 0))
        {
            throw new FormatException("--top-k is 1 or more, --temperature 0 or more");
        }

        var run = new Run(given);
        long began = Stopwatch.GetTimestamp();
        run.Encode(decoder);
        List<long> times = [];
        long[][] made;
        if (given.Contains("--follow") || given.Contains("--self-test"))
        {
            made = run.Follow(decoder, () => times.Add(Stopwatch.GetTimestamp()));
        }
        else
        {
            Func<float[], long>? choose = temperature > 0 ? Sampler(temperature, topK, seed) : null;
            long[] stop = Arguments.Ids(given["--stop"].LastOrDefault(string.Empty));
            made = decoder.Generate(run.Prompts, most, stop, choose, (_, _) => times.Add(Stopwatch.GetTimestamp()));
        }

        foreach (long[] row in made)
        {
            Console.WriteLine(string.Join(',', row));
        }

        PrintMeasured(began, times);
    }

    /// <summary>Picks a token from the likeliest ones, by their probabilities at a temperature.</summary>
    private static Func<float[], long> Sampler(float temperature, int topK, int seed)
    {
        var random = new Random(seed);
        return logits =>
        {
            int[] likeliest = Enumerable.Range(0, logits.Length)
                .OrderByDescending(token => logits[token])
                .Take(topK)
                .ToArray();
            double[] weights = Array.ConvertAll(
                likeliest,
                token => Math.Exp((logits[token] - logits[likeliest[0]]) / temperature));
            double left = random.NextDouble() * weights.Sum();
            int chosen = 0;
            while (chosen < likeliest.Length - 1 && left >= weights[chosen])
            {
                left -= weights[chosen++];
            }

            return likeliest[chosen];
        };
    }

    private static void PrintMeasured(long began, List<long> times)
    {
        if (times.Count == 0)
        {
            return;
        }

        double first = Stopwatch.GetElapsedTime(began, times[0]).TotalMilliseconds;
        double span = Stopwatch.GetElapsedTime(times[0], times[^1]).TotalSeconds;
        double rate = span > 0 ? (times.Count - 1) / span : 0;
        using Process process = Process.GetCurrentProcess();
        long peak = process.PeakWorkingSet64 / (1 << 20);
        Console.Error.WriteLine(string.Create(
            CultureInfo.InvariantCulture,
            $"first token {first:F1} ms, {rate:F1} tokens/s, peak memory {peak} MiB"));
    }
}

// Decodes from the command line: token ids in, token ids out. `--help` lists the options.

using System.Diagnostics;
using System.Globalization;
using System.Runtime.InteropServices;
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
        """;

    private static readonly string[] Known =
    [
        "--model",
        "--prompt",
        "--source",
        "--most",
        "--stop",
        "--follow",
        "--temperature",
        "--top-k",
        "--seed",
        "--self-test",
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
            Run(Parse(arguments));
            return 0;
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
            or IOException
            or UnauthorizedAccessException
            or DllNotFoundException)
        {
            Console.Error.WriteLine($"error: {error.Message}");
            return 1;
        }
    }

    private static void Run(ILookup<string, string> options)
    {
        long[][] prompts = options["--prompt"].Select(Ids).ToArray();
        long[][] follow = options["--follow"].Select(Ids).ToArray();
        int most = Integer(options["--most"].LastOrDefault("20"));
        int topK = Integer(options["--top-k"].LastOrDefault("50"));
        int seed = Integer(options["--seed"].LastOrDefault("0"));
        float temperature = Number(options["--temperature"].LastOrDefault("0"));
        using var decoder = new Decoder(Required(options, "--model"));
        long began = Stopwatch.GetTimestamp();
        decoder.Encode(ReadSource(options));
        List<long> times = [];
        long[][] made;
        if (follow.Length > 0)
        {
            made = Follow(decoder, prompts, follow, times);
            SelfTest(decoder, options["--self-test"].LastOrDefault("").Split(','), follow, made);
        }
        else
        {
            Func<float[], long>? choose = temperature > 0 ? Sampler(temperature, topK, seed) : null;
            long[] stop = Ids(options["--stop"].LastOrDefault(""));
            made = decoder.Generate(prompts, most, stop, choose, (_, _) => times.Add(Stopwatch.GetTimestamp()));
        }

        foreach (long[] row in made)
        {
            Console.WriteLine(string.Join(',', row));
        }

        PrintMeasured(began, times);
    }

    private static ILookup<string, string> Parse(string[] arguments)
    {
        List<(string Flag, string Value)> pairs = [];
        for (int i = 0; i < arguments.Length; i += 2)
        {
            if (!Known.Contains(arguments[i]))
            {
                throw new FormatException($"unknown option {arguments[i]}");
            }

            if (i + 1 == arguments.Length)
            {
                throw new FormatException($"{arguments[i]} needs a value");
            }

            pairs.Add((arguments[i], arguments[i + 1]));
        }

        ILookup<string, string> options = pairs.ToLookup(pair => pair.Flag, pair => pair.Value);
        Required(options, "--model");
        Required(options, "--prompt");
        return options;
    }

    private static string Required(ILookup<string, string> options, string flag)
        => options[flag].LastOrDefault() ?? throw new FormatException($"{flag} is missing");

    private static long[] Ids(string text)
        => text.Split(',', StringSplitOptions.RemoveEmptyEntries)
            .Select(part => long.TryParse(part, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out long id)
                ? id
                : throw new FormatException($"'{part}' is no token id"))
            .ToArray();

    private static int Integer(string text)
        => int.TryParse(text, NumberStyles.None, CultureInfo.InvariantCulture, out int number)
            ? number
            : throw new FormatException($"'{text}' is not a number that fits here");

    private static float Number(string text)
        => float.TryParse(text, NumberStyles.Float, CultureInfo.InvariantCulture, out float number)
            ? number
            : throw new FormatException($"'{text}' is not a number that fits here");

    private static Source ReadSource(ILookup<string, string> options)
    {
        Required(options, "--source");
        long[][] rows = options["--source"].Select(Ids).ToArray();
        if (rows.Any(row => row.Length != rows[0].Length))
        {
            throw new FormatException("the sources have different lengths");
        }

        return new Source([rows.Length, rows[0].Length], rows.SelectMany(row => row).ToArray());
    }

    /// <summary>The likeliest token after the prompt and after each given one, whatever was likeliest before.</summary>
    private static long[][] Follow(Decoder decoder, long[][] prompts, long[][] given, List<long> times)
    {
        if (given.Length != prompts.Length || given.Any(row => row.Length != given[0].Length))
        {
            throw new FormatException("--follow is given once for each prompt, always with as many ids");
        }

        long[][] made = Array.ConvertAll(prompts, _ => new long[given[0].Length + 1]);
        for (int position = 0; position <= given[0].Length; position++)
        {
            float[][] logits = position == 0
                ? decoder.Prefill(prompts)
                : decoder.Step(Array.ConvertAll(given, row => new[] { row[position - 1] }));
            times.Add(Stopwatch.GetTimestamp());
            for (int row = 0; row < made.Length; row++)
            {
                made[row][position] = Decoder.Likeliest(logits[row]);
            }
        }

        return made;
    }

    /// <summary>
    /// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
    /// </summary>
    private static void SelfTest(Decoder decoder, string[] wanted, long[][] given, long[][] made)
    {
        if (given[0].Length == 0)
        {
            return;
        }

        long[][] last = Array.ConvertAll(given, row => new[] { row[^1] });
        long[] expected = Array.ConvertAll(made, row => row[^1]);
        if (wanted.Contains("rewind"))
        {
            decoder.Rewind(1);
            Compare("rewind", decoder.Step(last), expected);
        }

        if (wanted.Contains("reorder"))
        {
            decoder.Rewind(1);

            // The rows backwards, and the first one once more.
            int[] order = [.. Enumerable.Range(0, given.Length).Reverse(), 0];
            decoder.Reorder(order);
            float[][] logits = decoder.Step(Array.ConvertAll(order, row => last[row]));
            Compare("reorder", logits, Array.ConvertAll(order, row => expected[row]));
        }
    }

    private static void Compare(string name, float[][] logits, long[] expected)
    {
        long[] got = Array.ConvertAll(logits, Decoder.Likeliest);
        if (!got.SequenceEqual(expected))
        {
            throw new InvalidOperationException(
                $"{name}: {string.Join(',', got)} in place of {string.Join(',', expected)}");
        }
    }

    /// <summary>Picks a token from the likeliest ones, by their probabilities at a temperature.</summary>
    private static Func<float[], long> Sampler(float temperature, int topK, int seed)
    {
        var random = new Random(seed);
        return logits =>
        {
            int[] likeliest = Enumerable.Range(0, logits.Length)
                .OrderByDescending(token => logits[token])
                .Take(Math.Max(topK, 1))
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

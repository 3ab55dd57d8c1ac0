// Decodes the runs of a probe file, compares the tokens with the expected ones, and writes down all calls.

using System.Text.Json;

namespace Decode;

/// <summary>Decodes the runs of a probe file.</summary>
/// <param name="decoder">Decodes; it stays open.</param>
/// <param name="results">Takes each line of the result file, without its end.</param>
/// <param name="reports">Takes a line for each run, for people.</param>
public sealed class Probe(Decoder decoder, Action<string> results, Action<string> reports)
{
    private static readonly string[] Known = [.. Run.Options, "--run", "--expect"];

    /// <summary>Decodes the runs, one a line; returns whether the tokens of all are as expected.</summary>
    public bool Decode(IEnumerable<string> lines)
    {
        List<ILookup<string, string>> runs = [];
        foreach ((string line, int number) in lines.Select((text, i) => (text, i + 1)))
        {
            if (string.IsNullOrWhiteSpace(line))
            {
                continue;
            }

            try
            {
                ILookup<string, string> given = Arguments.Parse(line.Split(' '), Known);
                Arguments.Required(given, "--run");
                runs.Add(given);
            }
            catch (FormatException error)
            {
                throw new FormatException($"line {number} of the probe: {error.Message}", error);
            }
        }

        if (runs.Count == 0)
        {
            throw new FormatException("the probe has no runs");
        }

        bool right = true;
        foreach (ILookup<string, string> given in runs)
        {
            right &= Decode(given);
        }

        return right;
    }

    private bool Decode(ILookup<string, string> given)
    {
        string name = Arguments.Required(given, "--run");
        long[][] tokens = [];
        string? error = null;
        string? difference = null;
        decoder.Trace(name, results);
        try
        {
            decoder.Reset();
            var run = new Run(given);
            long[][] expected = Expected(given, run.Followed());
            run.Encode(decoder);
            tokens = run.Follow(decoder);
            difference = Difference(tokens, expected);
        }
        catch (Exception failed) when (failed is not OutOfMemoryException)
        {
            // The next runs say more.
            error = failed.Message;
            difference = $"error: {string.Join(' ', error.Split((char[]?)null, StringSplitOptions.RemoveEmptyEntries))}";
        }
        finally
        {
            decoder.Trace(null, null);
        }

        results(JsonSerializer.Serialize(new { run = name, tokens, error }));
        reports($"{name}: {difference ?? "as expected"}");
        return difference is null;
    }

    /// <summary>The likeliest token after the prompt and after each given one; -1 where any is right.</summary>
    private static long[][] Expected(ILookup<string, string> given, long[][] followed)
    {
        long[][] expected = Arguments.Rows(given, "--expect");
        if (expected.Length != followed.Length || expected.Any(row => row.Length != followed[0].Length + 1))
        {
            throw new FormatException(
                "--expect: one id for the prompt and one for each token to follow, for each --prompt");
        }

        return expected;
    }

    /// <summary>The first token that is not the expected one, in words; null where there is none.</summary>
    private static string? Difference(long[][] tokens, long[][] expected)
    {
        for (int row = 0; row < expected.Length; row++)
        {
            for (int step = 0; step < expected[row].Length; step++)
            {
                if (expected[row][step] != -1 && tokens[row][step] != expected[row][step])
                {
                    return $"sequence {row}, step {step}: token {tokens[row][step]} in place of {expected[row][step]}";
                }
            }
        }

        return null;
    }
}

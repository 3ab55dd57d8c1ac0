// One run by its arguments: the prompts, and tokens that are given to follow them.

namespace Decode;

/// <param name="given">The options.</param>
internal sealed class Run(ILookup<string, string> given)
{
    public static readonly string[] Options =
    [
        "--prompt",
        "--follow",
        "--self-test",
    ];

    private static readonly string[] Tests = ["rewind", "reorder"];

    public long[][] Prompts => Arguments.Rows(given, "--prompt");

    /// <summary>The tokens to follow, as many for each prompt; none where none are given.</summary>
    public long[][] Followed()
    {
        int prompts = Prompts.Length;
        long[][] rows = given.Contains("--follow")
            ? Arguments.Rows(given, "--follow")
            : Enumerable.Range(0, prompts).Select(_ => Array.Empty<long>()).ToArray();
        if (rows.Length != prompts || rows.Any(row => row.Length != rows[0].Length))
        {
            throw new FormatException("--follow is given once for each prompt, always with as many ids");
        }

        return rows;
    }

    /// <summary>The likeliest token after the prompt and after each given one, whatever was likeliest before.</summary>
    /// <param name="decoder">Decodes; it stays open.</param>
    /// <param name="onStep">Called after each call.</param>
    public long[][] Follow(Decoder decoder, Action? onStep = null)
    {
        long[][] prompts = Prompts;
        long[][] follow = Followed();
        string[] tests = SelfTests(follow);
        long[][] made = Array.ConvertAll(prompts, _ => new long[follow[0].Length + 1]);
        for (int position = 0; position <= follow[0].Length; position++)
        {
            float[][] logits = position == 0
                ? decoder.Prefill(prompts)
                : decoder.Step(Array.ConvertAll(follow, row => new[] { row[position - 1] }));
            onStep?.Invoke();
            for (int row = 0; row < made.Length; row++)
            {
                made[row][position] = Decoder.Likeliest(logits[row]);
            }
        }

        SelfTest(decoder, tests, follow, made);
        return made;
    }

    /// <summary>What is tried after the last step.</summary>
    private string[] SelfTests(long[][] follow)
    {
        if (!given.Contains("--self-test"))
        {
            return [];
        }

        string[] tests = Arguments.Required(given, "--self-test").Split(',');
        if (tests.Except(Tests).Any())
        {
            throw new FormatException(
                $"--self-test knows {string.Join(" and ", Tests)}, not {string.Join(", ", tests.Except(Tests))}");
        }

        return follow[0].Length > 0 ? tests : throw new FormatException("--self-test needs tokens to --follow");
    }

    /// <summary>
    /// Takes the last step again after going back, and after changing rows: the likeliest tokens must be the same.
    /// </summary>
    private static void SelfTest(Decoder decoder, string[] tests, long[][] follow, long[][] made)
    {
        if (tests.Length == 0)
        {
            return;
        }

        long[][] last = Array.ConvertAll(follow, row => new[] { row[^1] });
        long[] expected = Array.ConvertAll(made, row => row[^1]);
        if (tests.Contains("rewind"))
        {
            decoder.Rewind(1);
            Compare("rewind", decoder.Step(last), expected);
        }

        if (tests.Contains("reorder"))
        {
            decoder.Rewind(1);

            // The rows backwards, and the first one once more.
            int[] order = [.. Enumerable.Range(0, follow.Length).Reverse(), 0];
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
}

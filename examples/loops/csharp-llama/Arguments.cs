// Options, each with its value behind it; an option may be given several times.

using System.Globalization;

namespace Decode;

internal static class Arguments
{
    public static ILookup<string, string> Parse(string[] words, IReadOnlyCollection<string> known)
    {
        List<(string Flag, string Value)> pairs = [];
        for (int i = 0; i < words.Length; i += 2)
        {
            if (!known.Contains(words[i]))
            {
                throw new FormatException($"unknown option {words[i]}");
            }

            if (i + 1 == words.Length)
            {
                throw new FormatException($"{words[i]} needs a value");
            }

            pairs.Add((words[i], words[i + 1]));
        }

        return pairs.ToLookup(pair => pair.Flag, pair => pair.Value);
    }

    public static string Required(ILookup<string, string> given, string flag)
        => given[flag].LastOrDefault() ?? throw new FormatException($"{flag} is missing");

    /// <summary>The ids of an option that is given once for each sequence.</summary>
    public static long[][] Rows(ILookup<string, string> given, string flag)
    {
        Required(given, flag);
        return given[flag].Select(Ids).ToArray();
    }

    /// <summary>Integers with commas between them.</summary>
    public static long[] Ids(string text)
        => text.Split(',', StringSplitOptions.RemoveEmptyEntries)
            .Select(part => long.TryParse(part, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out long id)
                ? id
                : throw new FormatException($"'{part}' is no token id"))
            .ToArray();

    public static int Integer(string text)
        => int.TryParse(text, NumberStyles.None, CultureInfo.InvariantCulture, out int number)
            ? number
            : throw new FormatException($"'{text}' is not a number that fits here");

    public static float Number(string text)
        => float.TryParse(text, NumberStyles.Float, CultureInfo.InvariantCulture, out float number)
            ? number
            : throw new FormatException($"'{text}' is not a number that fits here");
}

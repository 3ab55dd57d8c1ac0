// Execution providers by their names.

using Microsoft.ML.OnnxRuntime;

namespace Decode;

public static class Providers
{
    /// <summary>Lets sessions run on a provider, and on the CPU what it does not take.</summary>
    /// <param name="options">Of the sessions.</param>
    /// <param name="name">As the runtime has it (<c>CUDAExecutionProvider</c>) or short (<c>cuda</c>).</param>
    public static void Add(SessionOptions options, string name)
    {
        string[] available = OrtEnv.Instance().GetAvailableProviders();
        string wanted = Short(name);
        if (!available.Any(one => Short(one) == wanted))
        {
            throw new ArgumentException(
                $"this runtime has no execution provider {name}; it has {string.Join(", ", available)}");
        }

        switch (wanted)
        {
            case "cpu":
                break; // it is always there
            case "cuda":
                options.AppendExecutionProvider_CUDA();
                break;
            case "tensorrt":
                options.AppendExecutionProvider_Tensorrt();
                break;
            case "migraphx":
                options.AppendExecutionProvider_MIGraphX();
                break;
            case "dml":
                options.AppendExecutionProvider_DML();
                break;
            case "coreml":
                options.AppendExecutionProvider_CoreML();
                break;
            case "nnapi":
                options.AppendExecutionProvider_Nnapi();
                break;
            case "openvino":
                options.AppendExecutionProvider_OpenVINO();
                break;
            case "dnnl":
                options.AppendExecutionProvider_Dnnl();
                break;
            case "xnnpack":
            case "qnn":
            case "azure":
                options.AppendExecutionProvider(wanted.ToUpperInvariant());
                break;
            case "webgpu":
                options.AppendExecutionProvider("WebGPU");
                break;
            default:
                throw new ArgumentException($"the C# binding cannot add {name}");
        }
    }

    private static string Short(string name)
    {
        string plain = name.ToLowerInvariant().Replace("executionprovider", string.Empty);
        return plain == "directml" ? "dml" : plain;
    }
}

const ort = require("onnxruntime-node");
// SNIPPET
(async () => {
  const file = process.argv[2], trace = process.argv[3], hold = process.argv[4] === "hold";
  const session = await ort.InferenceSession.create(file);
  let pasts = {}, ids = [40n];
  for (const name of session.inputNames.filter((n) => n.startsWith("past"))) {
    pasts[name] = new ort.Tensor("float32", new Float32Array(32), [1, 4, 1, 8]);
  }
  for (let step = 0; step < 4; step++) {
    const fed = {
      ...pasts,
      input_ids: new ort.Tensor("int64", BigInt64Array.from(ids), [1, 1]),
      encoder_attention_mask: new ort.Tensor("int64", new BigInt64Array(7).fill(1n), [1, 7]),
      encoder_hidden_states: new ort.Tensor("float32", new Float32Array(224).map((_, i) => Math.sin(i)), [1, 7, 32]),
      use_cache_branch: new ort.Tensor("bool", [step > 0], [1]),
    };
    let got;
    try { got = await session.run(fed); } catch (error) { note(trace, file, fed, {}, String(error)); break; }
    note(trace, file, fed, got);
    ids = [40n + BigInt(step)];
    for (const name of Object.keys(got).filter((n) => n.startsWith("present"))) {
      if (!(hold && step && name.includes("encoder"))) pasts[name.replace("present", "past_key_values")] = got[name];
    }
  }
})();

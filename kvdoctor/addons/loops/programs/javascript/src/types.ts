// Types of the contract, of the library and of the runs. README.md has what the parts of a contract mean.

import type { InferenceSession, Tensor } from "onnxruntime-common";

/** A size, or the name of the axis that has it. */
export type Dim = number | string;

/** A sum: each named number times its factor. */
export type Terms = Readonly<Record<string, number>>;

/**
 * An input that is made for a call, row by row along its last axis. A row has `inside` from the column `begin` to before
 * `end`, and `step` more for each column, else `outside`; what `copy` names is written over it.
 */
export interface Made {
  name: string;
  dtype: string;
  dims: readonly Dim[];
  batch_axis: number | null;
  copy: "tokens" | "mask" | null;
  begin: Terms;
  end: Terms;
  inside: Terms;
  outside: number;
  step: number;
}

/** An output that becomes a value. */
export interface Take {
  output: string;
  value: string;
  carry: string;
  axis: number | null;
}

/** One call of a file. `values` names what is fed to an input; `sizes` are those that only values have. */
export interface Call {
  file: string;
  values: Readonly<Record<string, string>>;
  made: readonly Made[];
  outputs: readonly string[];
  logits: string | null;
  takes: readonly Take[];
  sizes: Readonly<Record<string, { value: string; axis: number }>>;
}

/** What a session of a file must have; -1 is any size. */
export interface ModelFile {
  file: string;
  external: readonly string[];
  inputs: Readonly<Record<string, { dtype: string; shape: readonly number[] }>>;
  outputs: readonly string[];
}

/** All that a loop does. */
export interface Contract {
  schema: string;
  model: string;
  files: readonly ModelFile[];
  calls: Readonly<Record<"encode" | "prefill" | "decode", readonly Call[]>>;
  zeros: readonly { value: string; dtype: string; dims: readonly Dim[] }[];
  cut: readonly { value: string; axis: number }[];
  rows: readonly { value: string; axis: number; each: number }[];
  heads: number;
  source: {
    dtype: string;
    dims: readonly Dim[];
    batch_axis: number | null;
    length_axis: number;
    masked: boolean;
  } | null;
  vocabulary: number;
  context_limit: number;
  longest: number;
  one_token: boolean;
  batch: number | null;
  capacity_is_chosen: boolean;
  pads: boolean;
  chunks: boolean;
  rewinds: boolean;
  reorders: boolean;
  placeholders: readonly number[];
  generation: {
    start: readonly number[];
    end: readonly number[];
    suppress: readonly number[];
    begin_suppress: readonly number[];
    forced: readonly (readonly [position: number, id: number])[];
  };
}

/** Token ids, a list for each sequence of the batch. */
export type Tokens = readonly (readonly number[])[];

/** What a call is made for: the rows that its inputs copy, and the padding on the left of each sequence. */
export interface Moment {
  sizes: Record<string, number>;
  rows: { tokens: Tokens; mask?: Tokens };
  padding: readonly number[];
}

/** Tensors by their names. */
export type Values = InferenceSession.OnnxValueMapType;

/** A tensor in a trace: all of its numbers where there are at most 64, else 64 from the first to the last. */
export interface TracedTensor {
  dtype: string;
  shape: readonly number[];
  data?: number[];
  sample?: number[];
}

/** A call: as a line of JSON it is what `kvdoctor step-test MODEL --trace FILE` reads. */
export interface TracedCall {
  file: string;
  fed: Record<string, TracedTensor>;
  got: Record<string, TracedTensor>;
  error: string | null;
}

/** How to open a model. */
export interface OpenOptions {
  /** Execution providers, threads, and more. */
  session?: InferenceSession.SessionOptions;
  /** Tokens that buffers of a chosen length have room for; 512 without it. */
  capacity?: number;
  /** Takes every call; tensors are read for it. */
  trace?: (call: TracedCall) => void;
  /** How a trace reads; `getData` without it. */
  read?: (value: Tensor) => Promise<Tensor.DataType>;
}

/** Numbers of a source, the last axis running fastest. */
export interface Source {
  data: Float32Array;
  shape: readonly number[];
}

/** What each entry of the vocabulary scores, of one sequence. */
export type Logits = Float32Array;

/** Picks a token; `tokens` are those so far. */
export type Choose = (logits: Logits, tokens: readonly number[]) => number;

/** How tokens are drawn; without any of it, the likeliest one is taken. */
export interface Sampling {
  /** 0 takes the likeliest token; 0 without it. */
  temperature?: number;
  /** Draw from so many of the likeliest; all without it. */
  topK?: number;
  /** Draw from the likeliest that have this probability together; 1 without it. */
  topP?: number;
  /** Draw from tokens with this part of the likeliest one's probability; 0 without it. */
  minP?: number;
  /** Divides the scores of tokens that are there already; 1 without it. */
  repetitionPenalty?: number;
  /** Of the random numbers; 0 without it. */
  seed?: number;
}

/** How a call is made. */
export interface CallOptions {
  /** Return the logits of all new tokens of the last call, those of a sequence one after the other in its row. */
  every?: boolean;
  /** Cancels before the next call of the model. */
  signal?: AbortSignal;
}

/** How to decode. */
export interface DecodeOptions extends Sampling {
  /** The most new tokens of a sequence; 20 without it. */
  most?: number;
  /** Tokens that end a sequence; those of the model's configs without it. */
  stop?: readonly number[];
  /** Picks a token; without it the sampling options do. */
  choose?: Choose;
  /** The tokens go on with the sequences that are there. */
  continued?: boolean;
  /** Cancels before the next call of the model. */
  signal?: AbortSignal;
}

/** A call of a run: with the likeliest token of each sequence, -1 where any is right, or with what it is given. */
export type RunCall =
  | { call: "prefill" | "step"; rows: Tokens; expect: readonly number[] }
  | ({ call: "generate"; rows: Tokens; most?: number; stop?: number[]; temperature?: number; seed?: number } & Partial<
      Record<"top_k" | "top_p" | "min_p" | "repetition_penalty", number>
    >)
  | { call: "encode"; rows: Tokens }
  | { call: "encode-file"; file: string; shape: number[] }
  | { call: "rewind"; count: number }
  | { call: "reorder"; order: number[] };
